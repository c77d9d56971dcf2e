"""vllm.grpc.engine: how gateways speak to vLLM. Ids in, ids out; see docs/protocols.md."""
