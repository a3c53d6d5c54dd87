"""Between text and tokens: the tokenizer, and chat templates in a sandbox."""
