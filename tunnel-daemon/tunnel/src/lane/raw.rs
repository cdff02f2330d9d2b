//! What is left of a lane once its frames are over.

use std::sync::Arc;

use adit_relay::KernelTls;
use bytes::Bytes;
use tokio::net::TcpStream;

use crate::lane::room::Slot;
use adit_telemetry::labels::{LaneEnd, Path};
use adit_telemetry::{AditMetrics, GaugeGuard};

/// A lane whose frames are over: its bytes are the tunnel's. Closing its socket resets the connection unless that is
/// disarmed: without frames nothing else tells the peer that what it got is not the whole, when this process is killed.
#[derive(Debug)]
pub struct RawLane {
    /// The lane's connection.
    pub socket: TcpStream,
    /// To be written before anything else: what the peer needs to know that the frames are over.
    pub unsent: Bytes,
    /// Read from the connection, and the first bytes of the tunnel.
    pub received: Bytes,
    /// Of the connection, when the kernel does its TLS.
    pub tls: Option<KernelTls>,
    /// What the lane holds and counts as, for as long as its connection lives.
    pub kept: LaneResources,
}

impl RawLane {
    /// What its tunnel travels on.
    #[must_use]
    pub fn path(&self) -> Path {
        match self.tls {
            Some(_) => Path::KtlsLane,
            None => Path::RawLane,
        }
    }
}

/// Says whether an agent may have tunnels, as of now: its lanes outlive its link.
pub trait LaneRights: std::fmt::Debug + Send + Sync {
    /// It may have none any more.
    fn are_revoked(&self) -> bool;

    /// From now on it may have none.
    fn revoke(&self);
}

/// A lane's share of what limits the number of lanes, and the gauge it is counted in. Of a raw lane also how it is counted
/// once it is no more.
#[derive(Debug, Default)]
pub struct LaneResources {
    /// Whether whoever holds the other end may still have tunnels; absent: it may.
    pub(super) rights: Option<Arc<dyn LaneRights>>,
    pub(super) counted: Option<GaugeGuard>,
    pub(super) held: Option<Slot>,
    pub(super) closes: Option<(AditMetrics, LaneEnd)>,
}

impl LaneResources {
    /// Whether whoever holds the other end may still have tunnels; absent: it may.
    #[must_use]
    pub fn rights(&self) -> Option<&Arc<dyn LaneRights>> {
        self.rights.as_ref()
    }

    /// The lane was lost.
    pub fn lost(&mut self) {
        if let Some((_, end)) = &mut self.closes {
            *end = LaneEnd::Lost;
        }
    }
}

impl Drop for LaneResources {
    fn drop(&mut self) {
        if let Some((metrics, end)) = self.closes.take() {
            metrics.lane_closed(end);
        }
    }
}
