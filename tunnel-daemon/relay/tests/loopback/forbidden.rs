//! Tests of a host that forbids io_uring, by a real seccomp filter in a separate process.

use std::{collections::BTreeMap, io::Write};

use adit_relay::{Basis, Engine, Preference, Relay, RelayConfig, probe};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::support::{Moves, Setup, Transport, alone, is_allowed, receive_exactly};

/// From here on `io_uring_setup` fails with `errno` in this process.
fn forbid_rings(errno: i32) {
    let action = SeccompAction::Errno(u32::try_from(errno).unwrap());
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_io_uring_setup, Vec::new())]),
        SeccompAction::Allow,
        action,
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter_all_threads(&program).unwrap();
}

#[test]
fn forbidden_ring_means_epoll_by_itself_and_an_error_by_name() {
    let path = concat!(
        module_path!(),
        "::forbidden_ring_means_epoll_by_itself_and_an_error_by_name"
    );
    alone(path, || {
        forbid_rings(libc::EPERM);
        let choice = probe(Preference::Auto).unwrap();
        assert_eq!(
            (choice.engine, choice.basis),
            (Engine::Epoll, Basis::Forbidden)
        );
        assert!(choice.reason.contains("seccomp"), "{}", choice.reason);
        let error = probe(Preference::IoUring).unwrap_err().to_string();
        assert!(error.contains("allow it in the profile"), "{error}");

        let setup = Setup {
            engine: Engine::Epoll,
            moves: Moves::Copy,
            transport: Transport::Tcp,
        };
        let world = setup.start_with(&RelayConfig::new(choice));
        let tunnel = world.open();
        (&tunnel.client).write_all(b"works").unwrap();
        assert_eq!(receive_exactly(&tunnel.target, 5), b"works");
    });
}

#[test]
fn relay_whose_ring_became_forbidden_does_not_start() {
    if !is_allowed(Engine::IoUring, "relay_whose_ring_became_forbidden") {
        return;
    }
    let path = concat!(
        module_path!(),
        "::relay_whose_ring_became_forbidden_does_not_start"
    );
    alone(path, || {
        let choice = probe(Preference::IoUring).unwrap();
        forbid_rings(libc::ENOSYS);
        assert!(Relay::start(&RelayConfig::new(choice)).is_err());
    });
}
