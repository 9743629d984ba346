"""The Helm chart, and the programs that write its schema and its page from the configuration's models and the
values' comments. Imported by their tests alone; imports `services.common.config`.
"""
