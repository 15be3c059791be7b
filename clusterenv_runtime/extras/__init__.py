"""Extensions that the core works without: launchers for schedulers, adapters, and the ready-made
policies, which the package's own name has for its users.
"""
