//! Sample tunnels for tests.

use crate::status::model::{API, Role, TunnelStatus, Tunnels};
use crate::status::tests::{agent, certificate};

pub(super) fn tunnel(id: u64, bytes: u64) -> TunnelStatus {
    TunnelStatus {
        id,
        client: Some("grpc".to_owned()),
        tenant: format!("tenant-{}", (id + 1) % 2),
        peer: format!("agent-{}", id % 2),
        principal: Some(format!("CN=edge-{}", id % 2)),
        destination: format!("10.0.0.{id}:443"),
        path: "lane".to_owned(),
        engine: "copy".to_owned(),
        driver: "task".to_owned(),
        age_seconds: 100.0 - id as f64,
        bytes_to_target: bytes,
        bytes_to_client: 2 * bytes,
        rtt_micros: (id > 1).then_some(id * 1000),
        retransmits: (id > 1).then_some(100 - id),
    }
}

pub(super) fn tunnels(pid: u32, tunnels: Vec<TunnelStatus>) -> Tunnels {
    Tunnels {
        api: API,
        role: Role::Server,
        id: "server-1".to_owned(),
        pid,
        open: tunnels.len() as u64,
        tunnels,
        worst_agents: vec![agent("agent-0", Some("CN=edge-0"), 3)],
        certificates: vec![certificate("/tls.crt", Some(3))],
    }
}
