"""`areal serve`: HTTP requests of the Tinker SDK enter, operations on adapters and answers of servers leave.

`command` starts it, `gateway` answers requests from the records of `tenants` and `journal`, `worker` trains.
"""
