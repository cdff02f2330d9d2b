//! The helper that opens listeners in other network namespaces. The test sends requests that a compromised daemon could
//! send.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags,
    SocketType, recvmsg, socketpair,
};

use super::namespaces::namespaces;
use crate::support::namespace::{Namespace, helper};

/// Plays a compromised daemon. Returns the helper's answers to one request, and the number of received sockets.
fn asked_by_hand(named: &Namespace, request: &[u8]) -> (Vec<String>, usize) {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let mut command = helper();
    // Arguments: no mark, no cgroup, one namespace.
    command.args(["0", ""]).arg(named.path());
    command
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    drop(command);
    let limit = Some(Duration::from_secs(60));
    set_socket_timeout(&ours, Timeout::Recv, limit).unwrap();
    let (mut answers, mut sockets) = (Vec::new(), 0);
    let mut next = || {
        let (text, came) = packet(&ours)?;
        sockets += came;
        answers.push(text.clone());
        Some(text)
    };
    assert_eq!(next().as_deref(), Some("ready"));
    // The serving thread keeps only the capabilities to enter a namespace. The other threads belong to the test harness.
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let kept = tasks
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok())
        .filter(|status| {
            // Bits of CAP_SYS_PTRACE and CAP_SYS_ADMIN.
            ["CapPrm", "CapEff"]
                .iter()
                .all(|set| status.contains(&format!("{set}:\t0000000000280000")))
                && status.contains("CapInh:\t0000000000000000")
                && status.contains("CapAmb:\t0000000000000000")
                && status.contains("NoNewPrivs:\t1")
        })
        .count();
    assert_eq!(kept, 1);
    rustix::net::send(&ours, request, SendFlags::NOSIGNAL).unwrap();
    // Until the end of the answer, or of the helper.
    while next().is_some_and(|text| !text.starts_with("done ")) {}
    child.kill().unwrap();
    child.wait().unwrap();
    answers.remove(0);
    (answers, sockets)
}

fn packet(channel: &OwnedFd) -> Option<(String, usize)> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(channel, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    let sockets = control.drain().map(|message| match message {
        RecvAncillaryMessage::ScmRights(sockets) => sockets.count(),
        _ => 0,
    });
    let sockets = sockets.sum();
    let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
    (got.bytes > 0).then_some((text, sockets))
}

#[test]
fn the_helper_opens_only_the_namespaces_named_on_its_command_line() {
    let Some([named, other]) = namespaces("a helper that is asked for more") else {
        return;
    };
    let id = |namespace: &Namespace| std::fs::metadata(namespace.path()).unwrap().ino();
    let path = other.path();
    // A usual request, and requests that claim to hold the other namespace.
    let of_other = id(&other);
    for held in [
        String::new(),
        format!(" {of_other}"),
        format!(" {of_other}+6"),
    ] {
        let (answers, sockets) = asked_by_hand(&named, format!("look{held}").as_bytes());
        assert_eq!(answers.len(), 2, "{answers:?}");
        assert!(
            answers[0].starts_with(&format!("new {} ", id(&named))),
            "{answers:?}"
        );
        assert!((1..=2).contains(&sockets), "{sockets}");
        assert_eq!(answers[1], "done 0 0 whole");
    }
    // An invalid request ends the helper without an answer.
    for request in [
        format!("new {} {}", id(&other), path.display()),
        format!("look {}", path.display()),
        format!("open {}", path.display()),
        format!("look -1 {}", id(&other)),
        "look 99999999999999999999".to_owned(),
        "\0".to_owned(),
    ] {
        let (answers, sockets) = asked_by_hand(&named, request.as_bytes());
        assert_eq!((answers.as_slice(), sockets), (&[][..], 0), "{request:?}");
    }
    let (answers, sockets) = asked_by_hand(&named, &[0xff, 0xfe]);
    assert_eq!((answers.as_slice(), sockets), (&[][..], 0));
}
