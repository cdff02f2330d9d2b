//! Tests of the decision, one row per combination of state.

extern crate std;

use core::cell::RefCell;
use std::vec::Vec;

use super::*;
use crate::tables::{ACTION_JOIN, ACTION_LEAVE, FLAG_HOME, SCOPE_BITS};

const VIA4: Endpoint = Endpoint::v4([127, 0, 0, 1], 40_000);
const VIA6: Endpoint = Endpoint::v6([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 40_001);

/// `SO_MARK` of the listener's sockets.
const MARK: u32 = 7;

/// The kernel's state as tables.
struct Tables {
    exempt: core::cell::Cell<bool>,
    bound: bool,
    rules: Vec<(u32, [u8; 20], Rule)>,
    listener: Option<Listener>,
    node: Option<Listener>,
    generation: u8,
    listens: bool,
    room: bool,
    stored: RefCell<Vec<Origin>>,
}

impl Surroundings for Tables {
    fn is_exempt(&self) -> bool {
        self.exempt.get()
    }

    fn is_bound(&self) -> bool {
        self.bound
    }

    fn is_noted(&self, number: u32) -> bool {
        self.listener(number).is_some()
    }

    fn join(&self) {
        self.exempt.set(true);
    }

    fn rule(&self, key: &RuleKey) -> Option<&Rule> {
        let key = key.to_bytes();
        let matches = |bits: u32, prefix: &[u8; 20]| {
            (0..bits).all(|bit| {
                let (at, mask) = ((bit / 8) as usize, 0x80_u8 >> (bit % 8));
                (key[at] ^ prefix[at]) & mask == 0
            })
        };
        let mut found: Vec<_> = self
            .rules
            .iter()
            .filter(|(bits, prefix, _)| matches(*bits, prefix))
            .collect();
        found.sort_by_key(|(bits, ..)| *bits);
        found.last().map(|(.., rule)| rule)
    }

    fn generation(&self) -> u8 {
        self.generation
    }

    fn listener(&self, number: u32) -> Option<Listener> {
        self.listener.filter(|_| number == 1)
    }

    fn node_listener(&self, number: u32) -> Option<Listener> {
        self.node.filter(|_| number == 1)
    }

    fn listens(&self, _at: &Endpoint, mark: u32) -> bool {
        self.listens && (mark == 0 || mark == MARK)
    }

    fn remember(&self, origin: &Origin) -> bool {
        self.stored.borrow_mut().push(*origin);
        self.room
    }
}

fn rule(prefix: Endpoint, bits: u32, action: u32, flags: u32) -> (u32, [u8; 20], Rule) {
    let rule = Rule {
        prefix_bits: bits,
        action,
        listener: 1,
        flags,
    };
    (SCOPE_BITS + bits, RuleKey::of(&prefix, 0).to_bytes(), rule)
}

fn tables(rules: Vec<(u32, [u8; 20], Rule)>) -> Tables {
    Tables {
        exempt: core::cell::Cell::new(false),
        bound: false,
        rules,
        listener: Some(Listener {
            v4: VIA4,
            v6: VIA6,
            mark: MARK,
        }),
        node: None,
        generation: 0,
        listens: true,
        room: true,
        stored: RefCell::default(),
    }
}

fn ten() -> Tables {
    tables(std::vec![rule(
        Endpoint::v4([10, 0, 0, 0], 0),
        8,
        ACTION_REDIRECT,
        0
    )])
}

fn call(destination: Endpoint) -> Call {
    Call {
        is_tcp: true,
        destination,
    }
}

const INSIDE: Endpoint = Endpoint::v4([10, 1, 2, 3], 9090);

#[test]
fn a_call_that_matches_a_rule_is_redirected_and_its_destination_stored() {
    let around = ten();
    assert_eq!(decide(&call(INSIDE), &around), Decision::Redirect(VIA4));
    let stored = around.stored.borrow();
    assert_eq!(stored.len(), 1);
    assert_eq!((stored[0].destination, stored[0].via), (INSIDE, VIA4));
}

#[test]
fn an_unmet_condition_leaves_the_call_unchanged() {
    type Spoil = fn(&mut Tables);
    let rows: [(Spoil, CallOutcome); 7] = [
        (|around| around.exempt.set(true), CallOutcome::Exempt),
        (|around| around.bound = true, CallOutcome::Exempt),
        (|around| around.rules.clear(), CallOutcome::NoRule),
        (|around| around.listener = None, CallOutcome::NoListener),
        (
            |around| {
                around.listener = Some(Listener {
                    v4: Endpoint::NONE,
                    v6: VIA6,
                    mark: 0,
                });
            },
            CallOutcome::NoListener,
        ),
        (|around| around.listens = false, CallOutcome::ListenerGone),
        (|around| around.room = false, CallOutcome::NotStored),
    ];
    for (spoil, why) in rows {
        let mut around = ten();
        spoil(&mut around);
        assert_eq!(decide(&call(INSIDE), &around), Decision::Leave(why));
    }
    let udp = Call {
        is_tcp: false,
        destination: INSIDE,
    };
    assert_eq!(decide(&udp, &ten()), Decision::Leave(CallOutcome::NotTcp));
}

#[test]
fn calls_from_a_namespace_without_a_listener_go_to_the_node_listener() {
    const NODE: Endpoint = Endpoint::v4([192, 0, 2, 1], 7000);
    let mut around = ten();
    around.node = Some(Listener {
        v4: NODE,
        v6: Endpoint::NONE,
        mark: 0,
    });
    // The listener in the caller's namespace comes first.
    assert_eq!(decide(&call(INSIDE), &around), Decision::Redirect(VIA4));
    around.listener = None;
    // The node's listener cannot be looked up from the caller's namespace.
    around.listens = false;
    assert_eq!(decide(&call(INSIDE), &around), Decision::Redirect(NODE));
    let flags: Vec<u32> = around.stored.borrow().iter().map(|o| o.flags).collect();
    assert_eq!(flags, [0, ORIGIN_TO_NODE]);
    // The node listener has no address of this family.
    around.rules = std::vec![rule(Endpoint::v6([0; 16], 0), 0, ACTION_REDIRECT, 0)];
    assert_eq!(
        decide(&call(Endpoint::v6([0x20; 16], 80)), &around),
        Decision::Leave(CallOutcome::NoListener)
    );
}

#[test]
fn rules_of_another_generation_do_not_match() {
    let mut around = ten();
    around.generation = 1;
    assert_eq!(
        decide(&call(INSIDE), &around),
        Decision::Leave(CallOutcome::NoRule)
    );
}

#[test]
fn a_deny_rule_denies_only_calls_that_it_would_have_redirected() {
    let closed = || {
        tables(std::vec![rule(
            Endpoint::v4([10, 0, 0, 0], 0),
            8,
            ACTION_REDIRECT,
            FLAG_DENY
        )])
    };
    let mut gone = closed();
    gone.listens = false;
    assert_eq!(decide(&call(INSIDE), &gone), Decision::Deny);
    let mut unknown = closed();
    unknown.listener = None;
    assert_eq!(decide(&call(INSIDE), &unknown), Decision::Deny);
    let mut bound = closed();
    bound.bound = true;
    assert_eq!(decide(&call(INSIDE), &bound), Decision::Deny);
    let elsewhere = call(Endpoint::v4([11, 0, 0, 1], 80));
    assert_eq!(
        decide(&elsewhere, &gone),
        Decision::Leave(CallOutcome::NoRule)
    );
    // Calls of the daemon's own sockets pass, or the tunnel could never reconnect.
    gone.exempt.set(true);
    assert_eq!(
        decide(&call(INSIDE), &gone),
        Decision::Leave(CallOutcome::Exempt)
    );
    assert_eq!(decide(&call(INSIDE), &closed()), Decision::Redirect(VIA4));
}

#[test]
fn the_longest_prefix_wins_and_then_the_port() {
    let ten = Endpoint::v4([10, 0, 0, 0], 0);
    let inner = Endpoint::v4([10, 1, 0, 0], 0);
    let redirect = Decision::Redirect(VIA4);
    let excluded = Decision::Leave(CallOutcome::Excluded);
    let with_port = |endpoint: Endpoint| Endpoint {
        port: 9090,
        ..endpoint
    };
    for (rules, expected) in [
        // An exclusion inside a rule, and a rule inside an exclusion.
        (
            std::vec![
                rule(ten, 8, ACTION_REDIRECT, 0),
                rule(inner, 16, ACTION_LEAVE, 0)
            ],
            excluded,
        ),
        (
            std::vec![
                rule(ten, 8, ACTION_LEAVE, 0),
                rule(inner, 16, ACTION_REDIRECT, 0)
            ],
            redirect,
        ),
        // The longer prefix wins, even if the shorter one names the port.
        (
            std::vec![
                rule(with_port(ten), 8, ACTION_REDIRECT, 0),
                rule(inner, 16, ACTION_LEAVE, 0)
            ],
            excluded,
        ),
        (
            std::vec![
                rule(with_port(inner), 16, ACTION_REDIRECT, 0),
                rule(ten, 8, ACTION_LEAVE, 0)
            ],
            redirect,
        ),
        // Of two rules with equal prefixes, the rule with the port wins.
        (
            std::vec![
                rule(with_port(ten), 8, ACTION_REDIRECT, 0),
                rule(ten, 8, ACTION_LEAVE, 0)
            ],
            redirect,
        ),
        (
            std::vec![
                rule(with_port(ten), 8, ACTION_LEAVE, 0),
                rule(ten, 8, ACTION_REDIRECT, 0)
            ],
            excluded,
        ),
    ] {
        assert_eq!(decide(&call(INSIDE), &tables(rules)), expected);
    }
}

#[test]
fn a_rule_for_all_ipv6_addresses_does_not_match_ipv4() {
    let all6 = tables(std::vec![rule(
        Endpoint::v6([0; 16], 0),
        0,
        ACTION_REDIRECT,
        0
    )]);
    assert_eq!(
        decide(&call(INSIDE), &all6),
        Decision::Leave(CallOutcome::NoRule)
    );
    assert_eq!(
        decide(&call(Endpoint::v6([0x20; 16], 80)), &all6),
        Decision::Redirect(VIA6)
    );
}

#[test]
fn a_call_to_the_listener_itself_is_not_redirected() {
    let all = tables(std::vec![rule(
        Endpoint::v4([0; 4], 0),
        0,
        ACTION_REDIRECT,
        0
    )]);
    assert_eq!(
        decide(&call(VIA4), &all),
        Decision::Leave(CallOutcome::Excluded)
    );
    assert!(all.stored.borrow().is_empty());
}

#[test]
fn a_process_that_calls_the_tunnel_server_becomes_exempt() {
    let server = Endpoint::v4([10, 0, 0, 1], 8091);
    let around = tables(std::vec![
        rule(Endpoint::v4([10, 0, 0, 0], 0), 8, ACTION_REDIRECT, 0),
        rule(server, 32, ACTION_JOIN, 0),
    ]);
    assert_eq!(decide(&call(INSIDE), &around), Decision::Redirect(VIA4));
    assert_eq!(
        decide(&call(server), &around),
        Decision::Leave(CallOutcome::Excluded)
    );
    // Calls that the joined process makes for clients are never redirected.
    assert_eq!(
        decide(&call(INSIDE), &around),
        Decision::Leave(CallOutcome::Exempt)
    );
}

#[test]
fn loopback_calls_exempt_a_process_only_in_the_servers_namespace() {
    let server = Endpoint::v4([127, 0, 0, 1], 8091);
    let rules = || {
        std::vec![
            rule(Endpoint::v4([10, 0, 0, 0], 0), 8, ACTION_REDIRECT, 0),
            rule(server, 32, ACTION_JOIN, FLAG_HOME),
        ]
    };
    let excluded = Decision::Leave(CallOutcome::Excluded);
    let mut elsewhere = tables(rules());
    elsewhere.listener = None;
    assert_eq!(decide(&call(server), &elsewhere), excluded);
    assert!(!elsewhere.exempt.get());
    let home = tables(rules());
    assert_eq!(decide(&call(server), &home), excluded);
    assert!(home.exempt.get());
}
