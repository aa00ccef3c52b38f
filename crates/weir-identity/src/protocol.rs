//! Application protocols (ALPN), by which an end says what a connection is for.

/// Application protocol (ALPN) between nodes. A connection for it is of no use at another port of the cluster.
pub const PEER_PROTOCOL: &[u8] = b"weir-peer/1";
/// Application protocol (ALPN) of the API.
pub const API_PROTOCOL: &[u8] = b"http/1.1";
/// Offered beside [`API_PROTOCOL`] by a node, which knows all authorities of the cluster and refuses a replaced certificate; never
/// agreed on.
pub const NODE_API_PROTOCOL: &[u8] = b"weir-node-api/1";
