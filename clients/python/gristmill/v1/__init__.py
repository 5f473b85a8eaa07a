"""Generated from protos/gristmill/v1 by protos/generate.sh. Do not edit."""
