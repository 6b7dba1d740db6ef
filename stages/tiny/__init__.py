"""The tiny trained model: a plain Llama with GQA that retrieves. `python -m stages.tiny.train` trains it from scratch."""
