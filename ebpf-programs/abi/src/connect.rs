//! What to do with a call of `connect`.

use crate::counters::CallOutcome;
use crate::endpoint::{AF_INET, Endpoint};
use crate::tables::{
    ACTION_JOIN, ACTION_REDIRECT, FLAG_DENY, FLAG_HOME, Listener, ORIGIN_TO_NODE, Origin, Rule,
    RuleKey,
};

/// A call, as far as its context says.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// A TCP stream socket. Others pass through the same hook.
    pub is_tcp: bool,
    /// Where it goes as things stand: what the caller named, or what another program made of it.
    pub destination: Endpoint,
}

/// What the decision asks the kernel. In a program these are map lookups and helpers; in tests, tables.
pub trait Surroundings {
    /// Whether the socket, or all of the calling process, must never be redirected.
    fn is_exempt(&self) -> bool;
    /// Whether the socket is bound to a device: it may not reach a listener of ours.
    fn is_bound(&self) -> bool;
    /// Whether the listener of this number is noted in the caller's network namespace.
    fn is_noted(&self, number: u32) -> bool;
    /// The calling process is part of the tunnel from now on.
    fn join(&self);
    /// Of the rules that are in force. Asked once for each call, so that no call sees a part of two sets.
    fn generation(&self) -> u8;
    /// The longest match of the table. By reference: of two values that meet in one, compilers keep parts that were never
    /// written, and without CAP_PERFMON the verifier lets nobody read those.
    fn rule(&self, key: &RuleKey) -> Option<&Rule>;
    /// The listener of this number in the caller's network namespace.
    fn listener(&self, number: u32) -> Option<Listener>;
    /// The listener of this number at the node's address, for callers whose namespace has none.
    fn node_listener(&self, number: u32) -> Option<Listener>;
    /// Whether something listens there, in the caller's network namespace, now; with that mark, unless it is 0.
    fn listens(&self, at: &Endpoint, mark: u32) -> bool;
    /// Remembers where the socket wanted to go; `false` if there is no room.
    fn remember(&self, origin: &Origin) -> bool;
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It goes where it was going.
    Leave(CallOutcome),
    /// It goes to this listener; its destination is remembered.
    Redirect(Endpoint),
    /// It fails.
    Deny,
}

impl Decision {
    /// As it is counted.
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

/// Decides about one call. Whatever is missing leaves it alone, unless the rule says to deny it.
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
    // Not one value out of two: see `Surroundings::rule`.
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

/// Sends a call to a listener, unless something is missing.
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
    // Whoever calls the listener itself gets there, and is refused there: nothing tells where it wants to go.
    if via == call.destination {
        return Decision::Leave(CallOutcome::Excluded);
    }
    // Nobody can look into the node's namespace from here. Its listener is noted as long as we live, and links end with us.
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

/// The longer of the matches with and without the port; with the port if they are equal.
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
