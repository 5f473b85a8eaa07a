"""The APIs in which agents call: how requests and answers of each are read and translated."""
