"""One use of a model: a dataset is scored, tasks of lm-eval are answered, somebody chats, a server is started."""
