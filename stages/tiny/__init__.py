"""The tiny trained model: a plain Llama with GQA that retrieves, made from nothing by `python -m stages.tiny.train`."""
