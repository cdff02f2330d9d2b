//! The process clock in the core's terms: time since an epoch, pausable in tests.

use std::sync::OnceLock;

use adit_core::session::Moment;
use tokio::time::Instant;

static EPOCH: OnceLock<Instant> = OnceLock::new();

fn epoch() -> Instant {
    *EPOCH.get_or_init(Instant::now)
}

/// The current moment.
#[must_use]
pub fn moment() -> Moment {
    let epoch = epoch();
    Moment(Instant::now().saturating_duration_since(epoch))
}

/// The runtime's instant of a moment.
#[must_use]
pub fn instant(moment: Moment) -> Instant {
    epoch() + moment.0
}
