//! The decision about a call of `connect`.

use crate::counters::CallOutcome;
use crate::endpoint::{AF_INET, Endpoint};
use crate::tables::{
    ACTION_JOIN, ACTION_REDIRECT, FLAG_DENY, FLAG_HOME, Listener, ORIGIN_TO_NODE, Origin, Rule,
    RuleKey,
};

/// A call of `connect`, from the program's context.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Whether the socket is a TCP stream socket. Other sockets pass through the same hook.
    pub is_tcp: bool,
    /// The call's destination: from the caller, or as rewritten by an earlier eBPF program.
    pub destination: Endpoint,
}

/// Queries of the decision. In a program these are map lookups and helpers; in tests, tables.
pub trait Surroundings {
    /// Whether the socket or the whole calling process must never be redirected.
    fn is_exempt(&self) -> bool;
    /// Whether the socket is bound to a device, so that it may not reach the listener.
    fn is_bound(&self) -> bool;
    /// Whether the map has the listener of this number for the caller's network namespace.
    fn is_noted(&self, number: u32) -> bool;
    /// Makes the calling process part of the tunnel.
    fn join(&self);
    /// Generation of the active rule set. Read once per call, so that no call sees rules of two sets.
    fn generation(&self) -> u8;
    /// The longest match of the table. Returned by reference: when compilers merge two values into one, uninitialised
    /// bytes may be copied, which the verifier refuses without CAP_PERFMON.
    fn rule(&self, key: &RuleKey) -> Option<&Rule>;
    /// The listener of this number in the caller's network namespace.
    fn listener(&self, number: u32) -> Option<Listener>;
    /// The listener of this number at the node's address, for callers whose namespace has no listener.
    fn node_listener(&self, number: u32) -> Option<Listener>;
    /// Whether a socket listens at this address in the caller's network namespace, with this mark unless `mark` is 0.
    fn listens(&self, at: &Endpoint, mark: u32) -> bool;
    /// Stores the socket's original destination; `false` if there is no room.
    fn remember(&self, origin: &Origin) -> bool;
}

/// The decision about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Leave the call unchanged.
    Leave(CallOutcome),
    /// Redirect the call to this listener; the original destination is stored.
    Redirect(Endpoint),
    /// The call fails.
    Deny,
}

impl Decision {
    /// The outcome to count.
    #[inline(always)]
    #[must_use]
    pub const fn outcome(&self) -> CallOutcome {
        match self {
            Self::Leave(why) => *why,
            Self::Redirect(_) => CallOutcome::Redirected,
            Self::Deny => CallOutcome::Denied,
        }
    }
}

/// Decides about one call. If a rule, listener or room is missing, the call is unchanged, or denied if the rule says so.
#[inline(always)]
pub fn decide(call: &Call, around: &impl Surroundings) -> Decision {
    if !call.is_tcp || call.destination.is_none() {
        return Decision::Leave(CallOutcome::NotTcp);
    }
    if around.is_exempt() {
        return Decision::Leave(CallOutcome::Exempt);
    }
    let Some(rule) = best_rule(&call.destination, around) else {
        return Decision::Leave(CallOutcome::NoRule);
    };
    if rule.action == ACTION_JOIN && (rule.flags & FLAG_HOME == 0 || around.is_noted(rule.listener))
    {
        around.join();
    }
    if rule.action != ACTION_REDIRECT {
        return Decision::Leave(CallOutcome::Excluded);
    }
    if around.is_bound() {
        return missing(rule, CallOutcome::Exempt);
    }
    // Two calls instead of one merged value: see `Surroundings::rule`.
    match around.listener(rule.listener) {
        Some(listener) => send(call, rule, &listener, 0, around),
        None => match around.node_listener(rule.listener) {
            Some(listener) => send(call, rule, &listener, ORIGIN_TO_NODE, around),
            None => missing(rule, CallOutcome::NoListener),
        },
    }
}

#[inline(always)]
const fn missing(rule: &Rule, why: CallOutcome) -> Decision {
    if rule.flags & FLAG_DENY == 0 {
        Decision::Leave(why)
    } else {
        Decision::Deny
    }
}

/// Redirects a call to a listener, if all checks pass.
#[inline(always)]
fn send(
    call: &Call,
    rule: &Rule,
    listener: &Listener,
    flags: u32,
    around: &impl Surroundings,
) -> Decision {
    let via = if call.destination.family == AF_INET {
        listener.v4
    } else {
        listener.v6
    };
    if via.is_none() {
        return missing(rule, CallOutcome::NoListener);
    }
    // A direct call to the listener is unchanged; the listener refuses it, because there is no original destination.
    if via == call.destination {
        return Decision::Leave(CallOutcome::Excluded);
    }
    // A lookup cannot reach the node's namespace. Its map entry and this program's bpf_link both end with the daemon.
    if flags & ORIGIN_TO_NODE == 0 && !around.listens(&via, listener.mark) {
        return missing(rule, CallOutcome::ListenerGone);
    }
    let origin = Origin {
        destination: call.destination,
        via,
        listener: rule.listener,
        flags,
    };
    if !around.remember(&origin) {
        return missing(rule, CallOutcome::NotStored);
    }
    Decision::Redirect(via)
}

/// The longer match of the rules with and without the port; if equal, the rule with the port.
#[inline(always)]
fn best_rule<'a>(destination: &Endpoint, around: &'a impl Surroundings) -> Option<&'a Rule> {
    let key = RuleKey::of(destination, around.generation());
    let named = around.rule(&key);
    let any = around.rule(&key.any_port());
    match (named, any) {
        (Some(named), Some(any)) if any.prefix_bits > named.prefix_bits => Some(any),
        (Some(named), _) => Some(named),
        (None, any) => any,
    }
}

#[cfg(test)]
mod tests;
