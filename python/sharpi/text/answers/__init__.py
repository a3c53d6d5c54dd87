"""What an answer says: reasoning, text and tool calls, told apart as its text comes."""
