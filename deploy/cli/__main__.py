"""`python -m deploy.cli`: the `mobula` command."""

from deploy.cli import main

if __name__ == "__main__":
    main()
