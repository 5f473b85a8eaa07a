"""The HTTP routes that Atropos' environments call, served in front of a run: `gristmill atropos`.

Atropos (NousResearch/atropos, archived) has a server that collects what environments post and hands it to a trainer;
the routes and their bodies are those of its `atroposlib/api/server.py` (atroposlib 0.4.0, commit 296a0bc5). Here they
lead into a run, as a client of the service, which knows nothing of it. Needs the extra `service`.
"""
