//! Tests of pairs whose side b uses kernel TLS: the tests of plain sockets for two such pairs in series, and tests
//! specific to TLS. Skipped if the kernel lacks kernel TLS; `cargo xtask vm` runs them on kernels that have it.

use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
};

use adit_relay::{
    Engine, KernelTls, KernelTlsError, KeysUsedUp, Op, Pair, PairEnd, Side, attach_kernel_tls,
};
use socket2::Socket;

use crate::{
    closing::{self, assert_reset},
    scale,
    support::{
        Moves, Pattern, Setup, Transport, World, has_kernel_tls, is_allowed, keys, promise,
        receive_all, receive_exactly, send_all, start_tls,
    },
    transfer, wake_ups,
};

/// Runs each named function for both drivers and both movers, over kernel TLS.
macro_rules! over_kernel_tls {
    ($($of:ident::$name:ident),+ $(,)?) => {
        over_kernel_tls!(@module tls_epoll_copy, Epoll, Copy, $($of::$name)+);
        over_kernel_tls!(@module tls_epoll_splice, Epoll, Splice, $($of::$name)+);
        over_kernel_tls!(@module tls_ring_copy, IoUring, Copy, $($of::$name)+);
        over_kernel_tls!(@module tls_ring_splice, IoUring, Splice, $($of::$name)+);
    };
    (@module $module:ident, $engine:ident, $moves:ident, $($of:ident::$name:ident)+) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $name() {
                if has_kernel_tls(stringify!($name)) && is_allowed(Engine::$engine, stringify!($name)) {
                    $of::$name(&Setup {
                        engine: Engine::$engine,
                        moves: Moves::$moves,
                        transport: Transport::KernelTls,
                    });
                }
            })+
        }
    };
}

over_kernel_tls!(
    transfer::both_directions_are_byte_exact_for_random_sizes_and_chunks,
    transfer::a_gibibyte_is_byte_exact_in_chunks_of_random_size,
    transfer::counters_equal_the_bytes_both_peers_saw,
    transfer::bytes_handed_over_come_first_in_both_directions,
    closing::end_without_a_byte_is_passed_on,
    closing::client_ends_first_with_data_pending_both_ways,
    closing::target_ends_first_with_data_pending_both_ways,
    closing::ended_direction_leaves_the_other_open,
    closing::reset_by_either_side_while_bytes_flow_names_it,
    closing::reset_of_a_paused_source_is_noticed,
    closing::reset_of_a_paused_sink_is_noticed,
    closing::both_sides_at_once_are_fine,
    own::end_without_good_bye_is_a_cut,
    own::bytes_that_are_no_record_fail_the_pair,
    own::used_up_keys_cut_the_pair_and_say_so,
    own::a_full_sink_takes_its_last_bytes_and_the_good_bye_later,
    own::keys_that_the_kernel_takes_in_part_are_told_from_those_it_leaves,
    scale::slow_readers_hold_bounded_memory,
    wake_ups::lasting_conditions_wake_no_thread,
);

/// Tests specific to TLS.
mod own {
    use super::*;

    /// One pair, its client, and the peer of its kernel TLS. `sealed`: records already sealed with the pair's keys.
    struct Half {
        client: Socket,
        peer: Socket,
        outcome: std::sync::mpsc::Receiver<adit_relay::Outcome>,
    }

    fn half(world: &World, sealed: u64, peer_has_tls: bool) -> Half {
        let (client, a) = world.sockets();
        let (peer, b) = world.sockets();
        let mut sending = keys(1);
        sending.records = sealed;
        let tls = start_tls(&b, &sending, &keys(2));
        if peer_has_tls {
            // The peer only needs the kernel to seal and open records.
            start_tls(&peer, &keys(2), &keys(1));
        }
        let (done, outcome) = promise();
        let pair = Pair {
            tls: Some(tls),
            ..Pair::new(a.into(), b.into())
        };
        world.handle.submit(pair, done).unwrap();
        Half {
            client,
            peer,
            outcome,
        }
    }

    impl Half {
        fn end(&self) -> PairEnd {
            let outcome = self.outcome.recv_timeout(crate::support::PATIENCE);
            outcome.unwrap().end
        }
    }

    pub(super) fn end_without_good_bye_is_a_cut(setup: &Setup) {
        let world = setup.start();
        let half = half(&world, 0, true);
        (&half.peer).write_all(b"not the whole").unwrap();
        assert_eq!(receive_exactly(&half.client, 13), b"not the whole");
        half.peer.shutdown(Shutdown::Write).unwrap();
        let end = half.end();
        let PairEnd::Failed { side, op, error } = end else {
            panic!("{end}")
        };
        assert_eq!((side, op), (Side::B, Op::Read));
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert_reset(setup, &half.client);
        world.until_empty();
    }

    pub(super) fn bytes_that_are_no_record_fail_the_pair(setup: &Setup) {
        let world = setup.start();
        for forged in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[
                23, 3, 3, 0, 20, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
            ],
        ] {
            let half = half(&world, 0, false);
            (&half.peer).write_all(forged).unwrap();
            let end = half.end();
            assert!(
                matches!(end, PairEnd::Failed { side: Side::B, .. }),
                "{end}"
            );
            assert_reset(setup, &half.client);
        }
        world.until_empty();
    }

    pub(super) fn used_up_keys_cut_the_pair_and_say_so(setup: &Setup) {
        let world = setup.start();
        let half = half(&world, (1 << 24) - 2, true);
        // Each byte is a separate record, since the next byte is sent only after the previous one has arrived.
        let mut buffer = [0; 8];
        let mut arrived = 0;
        while (&half.client).write_all(b"x").is_ok()
            && matches!((&half.peer).read(&mut buffer), Ok(1))
        {
            arrived += 1;
        }
        assert_eq!(arrived, 2);
        let end = half.end();
        let PairEnd::Failed { side, error, .. } = end else {
            panic!("{end}")
        };
        assert!(
            side == Side::B && KeysUsedUp::is_cause_of(&error),
            "{error}"
        );
        world.until_empty();
    }

    /// Small socket buffers and a slow reader: records that the kernel has sealed but not sent must not be lost at the
    /// close.
    pub(super) fn a_full_sink_takes_its_last_bytes_and_the_good_bye_later(setup: &Setup) {
        let mut world = setup.start();
        world.socket_bytes = Some(64 * 1024);
        for round in 0..16 {
            let tunnel = world.open();
            let sent = Pattern::new(round).bytes(200_000 + 7919 * usize::try_from(round).unwrap());
            tunnel.target.shutdown(Shutdown::Write).unwrap();
            std::thread::scope(|scope| {
                let (client, sent) = (&tunnel.client, &sent);
                scope.spawn(move || send_all(client, sent, 50_000, round));
                assert_eq!(receive_all(&tunnel.client, 16, 1).unwrap(), b"");
                assert!(receive_all(&tunnel.target, 3000, round).unwrap() == *sent);
            });
            let outcome = tunnel.outcome();
            assert!(matches!(outcome.end, PairEnd::Finished), "{outcome:?}");
            assert_eq!(outcome.to_b.bytes, sent.len() as u64);
        }
        world.until_empty();
    }

    /// The caller must know whether it can still use the keys itself.
    pub(super) fn keys_that_the_kernel_takes_in_part_are_told_from_those_it_leaves(setup: &Setup) {
        let world = setup.start();
        let (peer, socket) = world.sockets();
        let mut short = keys(2);
        short.key.truncate(20);
        let refused = KernelTls::start(&socket, &keys(1), &short);
        assert!(
            matches!(refused, Err(KernelTlsError::Untouched(_))),
            "{refused:?}"
        );
        // The socket still sends plaintext.
        attach_kernel_tls(&socket).unwrap();
        (&socket).write_all(b"clear").unwrap();
        assert_eq!(receive_exactly(&peer, 5), b"clear");
        // Both directions must use the same cipher, which the kernel checks with the second direction.
        short.key.truncate(16);
        let refused = KernelTls::start(&socket, &keys(1), &short);
        assert!(
            matches!(refused, Err(KernelTlsError::HalfWay(_))),
            "{refused:?}"
        );
        (&socket).write_all(b"sealed").unwrap();
        assert_ne!(receive_exactly(&peer, 6), b"sealed");
    }
}
