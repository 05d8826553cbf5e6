"""What a data set is: its shards with sizes, versions and sample counts, and a digest that names exactly that."""
