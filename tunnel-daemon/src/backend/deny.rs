//! The deny list, as it is on disk: who is refused, and which links end when it changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use adit_core::grant::{DenyError, DenyList};
use adit_core::ids::AgentId;
use arc_swap::ArcSwap;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use crate::hub::{Command, Hub};
use crate::lane::LaneRights;
use crate::net::agent_identity::AgentIdentity;
use crate::net::reload::Changes;
use crate::net::tasks::Tasks;
use crate::telemetry::AditMetrics;

/// How often the file is read, where its changes cannot be watched.
const POLL: Duration = Duration::from_secs(30);
/// Longest file that is read.
const BYTES_MAX: u64 = 4 << 20;

/// Why a deny list cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DenyFileError {
    /// It is longer than a deny list can be.
    #[error("--agent-deny {path}: it has more than {} MiB; write patterns", BYTES_MAX >> 20, path = .0.display())]
    TooLong(PathBuf),
    /// It cannot be read.
    #[error("--agent-deny {path}: {cause}", path = .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        cause: std::io::Error,
    },
    /// A line is wrong.
    #[error("--agent-deny {path}: {cause}", path = .path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// Which one, and why.
        cause: DenyError,
    },
}

/// The list in force. Clones share it.
#[derive(Clone, Default, Debug)]
pub struct Denied(Arc<ArcSwap<DenyList>>);

impl Denied {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or a line of it is wrong.
    pub fn load(path: &Path) -> Result<Self, DenyFileError> {
        let list = read(path)?;
        Ok(Self(Arc::new(ArcSwap::from_pointee(list))))
    }

    /// The entry that refuses an agent.
    pub(super) fn entry_for(&self, agent: &AgentId, identity: &AgentIdentity) -> Option<String> {
        let list = self.0.load();
        list.entry_for(agent, &identity.holders())
            .map(str::to_owned)
    }

    /// Follows the file until `stop`. What a new list refuses is ended: links at once, tunnels on lanes within seconds. A list
    /// that cannot be used changes nothing, and is logged.
    pub async fn follow(
        self,
        path: PathBuf,
        hub: Arc<Hub>,
        tasks: Tasks,
        metrics: AditMetrics,
        stop: CancellationToken,
    ) {
        let changes = Changes::of(&[&path]);
        let mut told = None;
        loop {
            let reading = path.clone();
            let read = tokio::task::spawn_blocking(move || read(&reading)).await;
            match read {
                Ok(Ok(list)) => {
                    told = None;
                    if **self.0.load() != list {
                        self.0.store(Arc::new(list));
                        tracing::info!(file = %path.display(), "the new deny list is in force");
                    }
                    self.judge(&hub, &tasks, &metrics);
                }
                Ok(Err(error)) => {
                    let text = error.to_string();
                    if told.as_ref() != Some(&text) {
                        tracing::error!(%error, "the new deny list cannot be used; the last one stays in force");
                        told = Some(text);
                    }
                }
                Err(_cut_off) => (),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = changes.next(POLL) => (),
            }
        }
    }

    /// Ends the links of agents that are refused now.
    fn judge(&self, hub: &Hub, tasks: &Tasks, metrics: &AditMetrics) {
        for link in hub.links() {
            let Some(entry) = self.entry_for(&link.info.agent, &link.info.identity) else {
                continue;
            };
            let principal = link.info.identity.owner().map_or("", AsRef::as_ref);
            tracing::warn!(agent = %link.info.agent, link = link.id.0, principal, entry, "the deny list ends a link");
            metrics.link_denied();
            if let Err(TrySendError::Full(stop)) = link.commands.try_send(Command::Stop) {
                let commands = link.commands.clone();
                let ending = async move {
                    let _over = commands.send(stop).await;
                };
                // Without room for a task the next look tries again.
                let _full = tasks.spawn("denied", ending);
            }
        }
    }
}

/// What the list says of one agent, whenever that is asked.
#[derive(Debug)]
pub(super) struct Rights {
    pub(super) denied: Denied,
    pub(super) agent: AgentId,
    pub(super) identity: AgentIdentity,
}

impl LaneRights for Rights {
    fn are_revoked(&self) -> bool {
        self.denied.entry_for(&self.agent, &self.identity).is_some()
    }
}

fn read(path: &Path) -> Result<DenyList, DenyFileError> {
    use std::io::Read as _;
    let unreadable = |cause| DenyFileError::Unreadable {
        path: path.to_owned(),
        cause,
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes > BYTES_MAX) {
        return Err(DenyFileError::TooLong(path.to_owned()));
    }
    DenyList::parse(&text).map_err(|cause| DenyFileError::Wrong {
        path: path.to_owned(),
        cause,
    })
}
