//! Links of one connection on the agent port, and the close of connections without links.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use adit_core::ids::LinkId;
use tokio::sync::Notify;
use tokio::time::timeout;

/// How often a connection is checked; it is closed after two checks in a row without a link.
const LOOK_FOR_LINKS_EVERY: Duration = Duration::from_secs(15);

/// The links of a connection. Clones share them.
#[derive(Clone, Default)]
pub(super) struct ConnectionLinks(Arc<Mutex<Vec<LinkId>>>, Arc<Notify>);

/// One link of a connection, removed when dropped.
pub(super) struct ConnectionLink {
    links: ConnectionLinks,
    id: LinkId,
}

impl ConnectionLinks {
    /// Adds a link.
    pub(super) fn enter(&self, id: LinkId) -> ConnectionLink {
        self.lock().push(id);
        ConnectionLink {
            links: self.clone(),
            id,
        }
    }

    /// All links at present.
    pub(super) fn all(&self) -> Vec<LinkId> {
        self.lock().clone()
    }

    /// Closes the connection now if it has no other link: its peer does not read, so what waits for the socket stays in memory.
    pub(super) fn look_now(&self) {
        self.1.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<LinkId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionLink {
    fn drop(&mut self) {
        self.links.lock().retain(|id| *id != self.id);
    }
}

/// Completes when a connection has had no link at two checks in a row. Such a connection holds a descriptor that others need,
/// and agents open a new connection for each attempt.
pub(super) async fn without_links(links: &ConnectionLinks) {
    let mut looks = 0;
    while looks < 2 {
        let ended = timeout(LOOK_FOR_LINKS_EVERY, links.1.notified()).await;
        looks = match (links.all().is_empty(), ended) {
            (true, Ok(())) => return,
            (true, Err(_time_for_a_look)) => looks + 1,
            (false, _) => 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Limit (times): A connection to the agent port without a link | closed after 30 s
    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_link_ends_after_thirty_seconds() {
        let links = ConnectionLinks::default();
        let start = Instant::now();
        without_links(&links).await;
        assert_eq!(start.elapsed().as_secs(), 30);
        let link = links.enter(LinkId(1));
        let stays = timeout(Duration::from_secs(3600), without_links(&links)).await;
        assert!(stays.is_err(), "it has a link");
        drop(link);
        without_links(&links).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_last_link_was_ended_for_memory_is_closed_at_once() {
        let links = ConnectionLinks::default();
        let (ended, other) = (links.enter(LinkId(1)), links.enter(LinkId(2)));
        drop(ended);
        links.look_now();
        let stays = timeout(Duration::from_secs(3600), without_links(&links)).await;
        assert!(stays.is_err(), "the other link needs it");
        drop(other);
        links.look_now();
        let start = Instant::now();
        without_links(&links).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
