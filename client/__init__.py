"""The client SDK: Client and AsyncClient over gRPC. No torch."""
