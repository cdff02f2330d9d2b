//! What the service manager is told: sd_notify(3) of systemd, by the socket that `NOTIFY_SOCKET` names. Without one nothing is told.

use sd_notify::NotifyState;

/// The program serves. A reload has ended, if one was begun.
pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

/// Files are read again; [`ready`] follows.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "cannot tell the service manager about the reload"),
    }
}

/// The program drains, then ends.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::warn!(%error, "the service manager does not take notifications");
    }
}
