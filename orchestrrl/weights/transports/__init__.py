"""How bytes get from one peer to another: a plug point, one file for each way."""
