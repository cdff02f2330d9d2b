//! How many servers there are, by what the held servers announce.

use std::collections::BTreeMap;

use adit_config::limits::SERVERS_HELD_MAX;
use adit_core::ids::ServerId;

use super::SearchRules;

/// What servers have announced. An entry lives as long as a link to its server.
#[derive(Debug)]
pub(super) struct Announced {
    rules: SearchRules,
    by_server: BTreeMap<ServerId, usize>,
    /// The last count of a new link.
    last: usize,
}

impl Announced {
    pub(super) fn new(rules: SearchRules) -> Self {
        Self {
            rules,
            by_server: BTreeMap::new(),
            last: 1,
        }
    }

    /// A new link's server announces `count`.
    pub(super) fn linked(&mut self, server: &ServerId, count: i64) {
        let count = believed(count);
        self.last = count;
        self.by_server.insert(server.clone(), count);
    }

    /// A held server has announced a count once more.
    pub(super) fn again(&mut self, server: &ServerId, count: i64) {
        if let Some(before) = self.by_server.get_mut(server) {
            *before = believed(count);
        }
    }

    /// The server's last link has ended.
    pub(super) fn forget(&mut self, server: &ServerId) {
        self.by_server.remove(server);
    }

    /// Number of servers, at least 1.
    pub(super) fn count(&self, held: &[ServerId]) -> usize {
        match self.rules {
            SearchRules::Native => self.largest(held).map_or(1, |(_, count)| count),
            SearchRules::Upstream => self.last,
        }
    }

    /// The held server that announces most servers, and how many.
    pub(super) fn largest<'a>(&self, held: &'a [ServerId]) -> Option<(&'a ServerId, usize)> {
        let counts = held
            .iter()
            .filter_map(|server| Some((server, *self.by_server.get(server)?)));
        counts.max_by_key(|(_, count)| *count)
    }
}

/// A server may announce any number; an agent holds at most 64.
fn believed(count: i64) -> usize {
    usize::try_from(count.max(1)).map_or(SERVERS_HELD_MAX, |count| count.min(SERVERS_HELD_MAX))
}
