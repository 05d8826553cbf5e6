"""Was each sample of an epoch delivered once? Answered from step records, over any number of restarts."""
