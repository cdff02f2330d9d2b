//! Outcomes of calls, counted per CPU in an array indexed by outcome.

/// The outcome of a call of `connect`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// Redirected to a listener.
    Redirected = 0,
    /// No rule matches the destination.
    NoRule = 1,
    /// An exclusion matches the destination.
    Excluded = 2,
    /// The socket or its process is part of the tunnel, or the socket is bound to a device.
    Exempt = 3,
    /// No listener in the caller's network namespace for this family.
    NoListener = 4,
    /// The map has a listener, but no socket listens there.
    ListenerGone = 5,
    /// The destination could not be stored.
    NotStored = 6,
    /// Not TCP over IPv4 or IPv6.
    NotTcp = 7,
    /// The rule denies calls that cannot be redirected.
    Denied = 8,
}

/// Every outcome, in the order of the array, with its name in metrics.
pub const CALL_OUTCOMES: [(CallOutcome, &str); 9] = [
    (CallOutcome::Redirected, "redirected"),
    (CallOutcome::NoRule, "no_rule"),
    (CallOutcome::Excluded, "excluded"),
    (CallOutcome::Exempt, "exempt"),
    (CallOutcome::NoListener, "no_listener"),
    (CallOutcome::ListenerGone, "listener_gone"),
    (CallOutcome::NotStored, "not_stored"),
    (CallOutcome::NotTcp, "not_tcp"),
    (CallOutcome::Denied, "denied"),
];

const _: () = {
    let mut at = 0;
    while at < CALL_OUTCOMES.len() {
        assert!(CALL_OUTCOMES[at].0 as usize == at);
        at += 1;
    }
};
