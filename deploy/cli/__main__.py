"""`python -m mobula.deploy.cli`: the `mobula` command."""

from mobula.deploy.cli import main

if __name__ == "__main__":
    main()
