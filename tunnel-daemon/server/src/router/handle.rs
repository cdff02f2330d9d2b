//! Handles to link tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use adit_core::dial::AnswerTimes;
use adit_core::ids::{AgentId, LinkId};
use adit_core::wire::identifiers::Identifiers;
use adit_core::wire::metadata::PeerVersion;
use tokio::sync::mpsc;
use tokio::time::Instant;

use adit_telemetry::AgentDials;
use adit_tls::agent_identity::AgentIdentity;
use adit_tls::stream::PeerAddr;
use adit_tunnel::channel::DirtyList;
use adit_tunnel::pool::LanePool;
use adit_tunnel::task::Command;

/// What is known of a link's peer.
#[derive(Clone, Debug)]
pub struct LinkInfo {
    /// The id that the agent claims.
    pub agent: AgentId,
    /// Destinations that the agent says it serves.
    pub identifiers: Identifiers,
    /// Identity that the agent has proved.
    pub identity: AgentIdentity,
    /// Whether both ends are Adit.
    pub credit: bool,
    /// The release that the peer reports.
    pub version: PeerVersion,
    /// The connection's remote address, for status output.
    pub address: PeerAddr,
    /// How the agent's dials ended, over all of its links.
    pub dials: Arc<AgentDials>,
}

/// Handle to a link task.
#[derive(Clone)]
pub struct LinkHandle {
    /// The link's id.
    pub id: LinkId,
    /// What is known of its peer.
    pub info: Arc<LinkInfo>,
    /// Bounded; a full queue means that the link is busy.
    pub commands: mpsc::Sender<Command>,
    /// Where endpoints of this link notify it.
    pub dirty_list: Arc<DirtyList>,
    /// Its lanes, if it may have lanes.
    pub lanes: Option<Arc<LanePool>>,
    /// When the link was registered.
    pub since: Instant,
    /// How soon its agent answers dials.
    pub answers: Arc<AnswerTimes>,
    /// Its agent is silent; stays set when the link ends.
    pub(super) is_silent: Arc<AtomicBool>,
    pub(super) is_ending: Arc<AtomicBool>,
}

impl LinkHandle {
    /// Whether its agent is silent, or was when the link ended.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.is_silent.load(Relaxed)
    }

    /// Ends the link once its task accepts one more command; `None`: an end is already pending. Dropping the future undoes
    /// that.
    pub fn end(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.end_by(Command::Stop)
    }

    /// As [`Self::end`]; the agent is told `why`.
    pub fn revoke(&self, why: String) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.end_by(Command::Revoke(why))
    }

    fn end_by(&self, command: Command) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.is_ending.swap(true, Relaxed) {
            return None;
        }
        let commands = self.commands.clone();
        let pending = PendingEnd(Some(Arc::clone(&self.is_ending)));
        Some(async move {
            let mut pending = pending;
            let _over = commands.send(command).await;
            pending.0 = None;
        })
    }
}

/// A requested end that the link's task has not received yet.
struct PendingEnd(Option<Arc<AtomicBool>>);

impl Drop for PendingEnd {
    fn drop(&mut self) {
        if let Some(is_ending) = &self.0 {
            is_ending.store(false, Relaxed);
        }
    }
}
