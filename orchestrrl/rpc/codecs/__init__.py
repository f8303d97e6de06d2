"""Between protobuf messages and the values of the model, both ways."""
