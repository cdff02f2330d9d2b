//! Connections of the agent port that carry no link.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// How often a connection of somebody without a certificate is looked at, which may be without a link for two looks.
const LOOK_FOR_LINKS_EVERY: Duration = Duration::from_secs(15);
/// A link of a connection, for as long as it lives.
pub(super) struct CountedLink(Arc<AtomicUsize>);

impl CountedLink {
    pub(super) fn new(links: Arc<AtomicUsize>) -> Self {
        links.fetch_add(1, Relaxed);
        Self(links)
    }
}

impl Drop for CountedLink {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Ends when a connection of somebody without a certificate has had no link at one look after another: it holds a descriptor that
/// others need, and agents connect anew for each attempt.
pub(super) async fn without_links(links: &AtomicUsize, is_stranger: bool) {
    if !is_stranger {
        return std::future::pending().await;
    }
    let mut looks = 0;
    while looks < 2 {
        tokio::time::sleep(LOOK_FOR_LINKS_EVERY).await;
        looks = if links.load(Relaxed) > 0 {
            0
        } else {
            looks + 1
        };
    }
}
