"""Rules that score the responses to public data sets, by a row's data source."""
