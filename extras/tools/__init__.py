"""Tools of yaml files, and those that are shipped: a calculator, search, GSM8K's check of an answer."""
