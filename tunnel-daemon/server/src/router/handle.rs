//! How others reach a link task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use adit_core::dial::AnswerTimes;
use adit_core::ids::LinkId;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::router::route::LinkInfo;
use adit_tunnel::channel::DirtyList;
use adit_tunnel::pool::LanePool;
use adit_tunnel::task::Command;

/// How others reach a link task.
#[derive(Clone)]
pub struct LinkHandle {
    /// Names the link.
    pub id: LinkId,
    /// Its peer.
    pub info: Arc<LinkInfo>,
    /// Bounded; full means busy.
    pub commands: mpsc::Sender<Command>,
    /// Where endpoints of this link report.
    pub dirty_list: Arc<DirtyList>,
    /// Its lanes, if it may have some.
    pub lanes: Option<Arc<LanePool>>,
    /// Since when it is there.
    pub since: Instant,
    /// How soon its agent answers dials.
    pub answers: Arc<AnswerTimes>,
    /// Its agent is silent; stays when the link ends.
    pub(super) is_silent: Arc<AtomicBool>,
    pub(super) is_ending: Arc<AtomicBool>,
}

impl LinkHandle {
    /// Ends the link once its task takes one more command; `None`: somebody has begun to. Dropping the future undoes that.
    pub fn end(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        if self.is_ending.swap(true, Relaxed) {
            return None;
        }
        let commands = self.commands.clone();
        let pending = PendingEnd(Some(Arc::clone(&self.is_ending)));
        Some(async move {
            let mut pending = pending;
            let _over = commands.send(Command::Stop).await;
            pending.0 = None;
        })
    }
}

/// The end of a link that its task has not heard of yet.
struct PendingEnd(Option<Arc<AtomicBool>>);

impl Drop for PendingEnd {
    fn drop(&mut self) {
        if let Some(is_ending) = &self.0 {
            is_ending.store(false, Relaxed);
        }
    }
}
