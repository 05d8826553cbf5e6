"""The product, and the ceilings that it is measured against. They run in a process of their own."""
