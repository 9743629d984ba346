"""Output for people: terminal, HTML, Markdown. Only `loadgen.commands` may import it."""
