"""The tiny trained model: a plain Llama with GQA that retrieves. checkpoint/README.md says how it was made."""
