//! Counts of live connections that the metrics already contain, so that no byte is counted twice.

use std::collections::HashMap;

use adit_telemetry::AccountCounts;

/// Counts by socket cookie.
pub(super) struct Counted {
    /// With the number of the sweep that saw the connection last.
    known: HashMap<u64, (AccountCounts, u64)>,
    sweep: u64,
    /// Most connections of one sweep.
    sweep_max: usize,
}

impl Counted {
    pub(super) fn new(sweep_max: usize) -> Self {
        Self {
            known: HashMap::new(),
            sweep: 0,
            sweep_max,
        }
    }

    pub(super) fn begin_sweep(&mut self) {
        self.sweep += 1;
    }

    /// A sweep saw a connection. Returns the counts before, and whether this sweep sees the connection for the first time.
    pub(super) fn met(&mut self, cookie: u64, now: AccountCounts) -> (AccountCounts, bool) {
        let before = self.known.insert(cookie, (now, self.sweep));
        let (before, seen) = before.unwrap_or_default();
        (before, seen < self.sweep)
    }

    /// A connection has ended. Returns the counts before.
    pub(super) fn take(&mut self, cookie: u64) -> AccountCounts {
        let (before, _sweep) = self.known.remove(&cookie).unwrap_or_default();
        before
    }

    /// Ends a sweep. `is_cut`: the sweep did not reach all live connections.
    ///
    /// A connection that a complete sweep did not see has ended. Its end event is pending or was lost, so the entry is kept
    /// for one more sweep. After an incomplete sweep unseen connections may be live: without their entry they would be
    /// counted again from zero. So they count as seen, unless there are far more entries than the table holds, which are then
    /// those of lost ends.
    pub(super) fn end_sweep(&mut self, is_cut: bool) {
        if is_cut && self.known.len() <= 2 * self.sweep_max {
            for (_counts, seen) in self.known.values_mut() {
                *seen = self.sweep;
            }
            return;
        }
        let oldest = self.sweep.saturating_sub(1);
        self.known.retain(|_cookie, (_, seen)| *seen >= oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 4;

    fn sent(sent_bytes: u64) -> AccountCounts {
        AccountCounts {
            sent_bytes,
            ..AccountCounts::default()
        }
    }

    /// That many sweeps that meet no known connection.
    fn sweeps(counted: &mut Counted, number: usize, is_cut: bool) {
        for _sweep in 0..number {
            counted.begin_sweep();
            counted.end_sweep(is_cut);
        }
    }

    #[test]
    fn growth_is_counted_once_when_a_scan_repeats_a_connection() {
        let mut counted = Counted::new(MAX);
        counted.begin_sweep();
        assert_eq!(counted.met(7, sent(10)), (sent(0), true));
        assert_eq!(counted.met(7, sent(12)), (sent(10), false));
        counted.end_sweep(false);
        counted.begin_sweep();
        assert_eq!(counted.met(7, sent(15)), (sent(12), true));
        assert_eq!(counted.take(7), sent(15));
        assert_eq!(counted.take(7), sent(0));
    }

    #[test]
    fn a_connection_missing_from_two_complete_scans_is_forgotten() {
        let mut counted = Counted::new(MAX);
        counted.begin_sweep();
        let _new = counted.met(7, sent(10));
        sweeps(&mut counted, 1, false);
        assert_eq!(counted.known.len(), 1);
        sweeps(&mut counted, 1, false);
        assert_eq!(counted.known.len(), 0);
    }

    /// A connection dropped too early would be counted again from its beginning.
    #[test]
    fn a_connection_missing_from_incomplete_scans_is_kept() {
        let mut counted = Counted::new(MAX);
        counted.begin_sweep();
        let _new = counted.met(7, sent(10));
        sweeps(&mut counted, 9, true);
        // One complete sweep does not end it either: its end event may still be in flight.
        sweeps(&mut counted, 1, false);
        assert_eq!(counted.take(7), sent(10));
    }

    /// Limit (accounting): Connections whose accounts metrics hold | 131,072. A lost end is noticed by the second sweep
    #[test]
    fn connections_with_lost_end_events_are_bounded() {
        let mut counted = Counted::new(MAX);
        for first in (0..100).step_by(MAX) {
            counted.begin_sweep();
            for cookie in first..first + MAX as u64 {
                let _new = counted.met(cookie, sent(1));
            }
            counted.end_sweep(true);
            assert!(counted.known.len() <= 3 * MAX, "{}", counted.known.len());
        }
    }
}
