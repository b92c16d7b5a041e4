def page(data): raise NotImplementedError
