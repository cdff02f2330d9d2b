//! What became of each call, counted per CPU in an array whose index is the outcome.

/// What the redirect did with a call of `connect`, and why.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// Sent to a listener.
    Redirected = 0,
    /// No rule names the destination.
    NoRule = 1,
    /// An exclusion names it.
    Excluded = 2,
    /// The socket or its process is part of the tunnel, or the socket is bound to a device.
    Exempt = 3,
    /// No listener in the caller's network namespace for this family.
    NoListener = 4,
    /// A listener is noted, but nothing listens there.
    ListenerGone = 5,
    /// The destination could not be stored.
    NotStored = 6,
    /// Neither TCP over IPv4 nor IPv6.
    NotTcp = 7,
    /// No listener, and the rule says to deny the call then.
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
