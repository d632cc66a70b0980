"""`mobula doctor`: is this machine, or every node of a cluster, fit for a configuration?"""
