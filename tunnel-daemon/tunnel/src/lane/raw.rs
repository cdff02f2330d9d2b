//! A lane's connection after its last frame.

use std::sync::Arc;

use adit_core::session::Promise;
use adit_relay::KernelTls;
use bytes::Bytes;
use tokio::net::TcpStream;

use crate::lane::room::Slot;
use adit_telemetry::labels::{LaneCloseReason, Path};
use adit_telemetry::{AditMetrics, GaugeGuard};

/// A lane whose frames are over: its bytes are the tunnel's. By default closing its socket resets the connection: without
/// frames, RST alone tells the peer that the bytes are incomplete when this process is killed.
#[derive(Debug)]
pub struct RawLane {
    /// The lane's connection.
    pub socket: TcpStream,
    /// To be written first: what the peer needs to learn that the frames are over.
    pub unsent: Bytes,
    /// The first bytes of the tunnel, already read from the connection.
    pub received: Bytes,
    /// The connection's TLS session, when the kernel handles it.
    pub tls: Option<KernelTls>,
    /// The lane's slot and gauge, for as long as the connection lives.
    pub kept: LaneResources,
}

impl RawLane {
    /// The path that the tunnel takes.
    #[must_use]
    pub fn path(&self) -> Path {
        match self.tls {
            Some(_) => Path::KtlsLane,
            None => Path::RawLane,
        }
    }
}

/// Whether an agent may have tunnels; asked at any time, since its lanes outlive its link.
pub trait LaneRights: std::fmt::Debug + Send + Sync {
    /// The agent may have no more tunnels.
    fn are_revoked(&self) -> bool;

    /// Withdraws the agent's right to tunnels.
    fn revoke(&self);
}

/// A lane's slot in the limit on lanes, and the gauge it is counted in. For a raw lane also the label of its close.
#[derive(Debug, Default)]
pub struct LaneResources {
    /// Rights of the agent at the other end; `None`: it may have tunnels.
    pub(super) rights: Option<Arc<dyn LaneRights>>,
    pub(super) counted: Option<GaugeGuard>,
    pub(super) held: Option<Slot>,
    /// Memory reserved for the tunnel on a raw lane.
    pub promise: Option<Promise>,
    pub(super) closes: Option<(AditMetrics, LaneCloseReason)>,
}

impl LaneResources {
    /// Rights of the agent at the other end; `None`: it may have tunnels.
    #[must_use]
    pub fn rights(&self) -> Option<&Arc<dyn LaneRights>> {
        self.rights.as_ref()
    }

    /// Counts the close of the lane as a loss.
    pub fn lost(&mut self) {
        if let Some((_, end)) = &mut self.closes {
            *end = LaneCloseReason::Lost;
        }
    }
}

impl Drop for LaneResources {
    fn drop(&mut self) {
        if let Some((metrics, end)) = self.closes.take() {
            metrics.lanes_closed.count(end);
        }
    }
}
