//! The helper's process: keeps CAP_SYS_ADMIN, enters namespaces, makes sockets there, sends them to the daemon.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, capabilities, clear_ambient_capability_set,
    move_into_link_name_space, set_capabilities, set_no_new_privs,
};
use socket2::{Domain, Socket, Type};

use super::find::{Found, Namespace};
use super::wire::{self, Asked, TEXT_BYTES_MAX, held, receive};
use adit_config::{NetnsHelperOptions, limits};

/// Serves the daemon at standard input until the daemon goes away.
///
/// # Errors
/// The helper was not started by a daemon; or it cannot return to its own namespace, and must not go on.
pub fn run(options: &NetnsHelperOptions) -> Result<(), String> {
    let input = io::stdin();
    let channel = input.as_fd();
    if socket_type(channel) != Ok(SocketType::SEQPACKET) {
        return Err(
            "standard input is no socket of a server or agent: they start this for --redirect-netns"
                .to_owned(),
        );
    }
    let gone = |error: io::Error| format!("answering the daemon: {error}");
    let home = match restrict(options.mark != 0).and_then(|()| home()) {
        Ok(home) => home,
        Err(why) => return wire::send(channel, &format!("refused {why}"), &[]).map_err(gone),
    };
    wire::send(channel, "ready", &[]).map_err(gone)?;
    while let Some((request, _none)) = receive(channel).map_err(gone)? {
        let held = held(&request).ok_or_else(|| format!("no request: {request:?}"))?;
        answer(channel, options, &home, &held)?;
    }
    Ok(())
}

struct Home {
    file: File,
    id: u64,
}

fn home() -> Result<Home, String> {
    let path = "/proc/self/ns/net";
    let opened = File::open(path).and_then(|file| {
        let id = file.metadata()?.ino();
        Ok(Home { file, id })
    });
    opened.map_err(|error| format!("{path}: {error}: mount /proc"))
}

/// Keeps only the capabilities for entering namespaces: CAP_SYS_ADMIN; CAP_SYS_PTRACE, if present, without which the
/// namespaces of other users' processes cannot be read; CAP_NET_ADMIN only to mark sockets.
fn restrict(marks: bool) -> Result<(), String> {
    let failed = |error: rustix::io::Errno| format!("dropping capabilities: {error}");
    let had = capabilities(None).map_err(failed)?.permitted;
    if !had.contains(CapabilitySet::SYS_ADMIN) {
        return Err(
            "--redirect-netns needs CAP_SYS_ADMIN at the start, for the helper that opens listeners in other network namespaces: \
             run with it, or drop the flag"
                .to_owned(),
        );
    }
    let mut wanted = CapabilitySet::SYS_ADMIN | CapabilitySet::SYS_PTRACE;
    if marks {
        wanted |= CapabilitySet::NET_ADMIN;
    }
    let kept = had & wanted;
    set_no_new_privs(true).map_err(failed)?;
    clear_ambient_capability_set().map_err(failed)?;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(failed)
}

fn answer(
    channel: BorrowedFd<'_>,
    options: &NetnsHelperOptions,
    home: &Home,
    held: &[Asked],
) -> Result<(), String> {
    let say = |text: String, sockets: &[OwnedFd]| {
        let borrowed: Vec<BorrowedFd<'_>> = sockets.iter().map(|socket| socket.as_fd()).collect();
        wire::send(channel, &text, &borrowed).map_err(|error| format!("answering: {error}"))
    };
    let fail = |name: &std::path::Path, why: String| {
        say(format!("fail {}\t{}", short(name), clip(&why)), &[])
    };
    let mut found = Found::look(options, home.id);
    // Held namespaces keep their places, however many new ones there are.
    let ids: Vec<u64> = held.iter().map(|held| held.id).collect();
    let still = found.still(&ids);
    for id in &still {
        say(format!("have {id}"), &[])?;
    }
    if kernel_has_v6() {
        for namespace in found.wanting_v6(held) {
            let v6 = || socket(Ipv6Addr::LOCALHOST.into(), options.mark);
            // Mostly IPv6 is still missing, which is no failure.
            if let Ok(sockets) = enter(namespace, home, || v6().map(|socket| vec![socket]))? {
                say(format!("more {}", namespace.id), &sockets)?;
            }
        }
    }
    let room = limits::REDIRECT_NETNS_MAX.saturating_sub(still.len());
    let (fresh, over) = found.fresh(&ids, room);
    for namespace in fresh {
        match enter(&namespace, home, || sockets(options.mark))? {
            Ok(sockets) => {
                let name = short(&namespace.path);
                say(format!("new {} {name}", namespace.id), &sockets)?;
            }
            // The process has just ended.
            Err(error) if error.kind() == io::ErrorKind::NotFound => (),
            Err(error) => fail(&namespace.path, in_words(&error))?,
        }
    }
    for (path, error) in found.failed.into_iter().take(limits::REDIRECT_NETNS_MAX) {
        fail(&path, error.to_string())?;
    }
    let look = if found.is_cut { "cut" } else { "whole" };
    say(format!("done {over} {} {look}", found.unreadable), &[])
}

fn in_words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL | libc::ENETUNREACH) => {
            "loopback is down there: `ip link set lo up`".to_owned()
        }
        Some(libc::EINVAL) => "it is no network namespace".to_owned(),
        _ => error.to_string(),
    }
}

/// Whether the kernel has IPv6. Without it, each IPv6 socket makes the kernel start a program that looks for a module.
fn kernel_has_v6() -> bool {
    std::fs::metadata("/proc/self/net/if_inet6").is_ok()
}

/// Sockets that `make` makes in a namespace. The outer error: this process cannot leave that namespace.
fn enter(
    namespace: &Namespace,
    home: &Home,
    make: impl FnOnce() -> io::Result<Vec<OwnedFd>>,
) -> Result<io::Result<Vec<OwnedFd>>, String> {
    let file = match namespace.open() {
        Ok(file) => file,
        Err(error) => return Ok(Err(error)),
    };
    let network = Some(LinkNameSpaceType::Network);
    if let Err(error) = move_into_link_name_space(file.as_fd(), network) {
        return Ok(Err(error.into()));
    }
    let made = make();
    move_into_link_name_space(home.file.as_fd(), network)
        .map_err(|error| format!("cannot return to our own network namespace: {error}"))?;
    Ok(made)
}

/// Bound, not listening yet: the daemon may have to prepare the sockets first.
fn sockets(mark: u32) -> io::Result<Vec<OwnedFd>> {
    let v4 = socket(Ipv4Addr::LOCALHOST.into(), mark)?;
    // A namespace may lack IPv6; IPv6 calls there are not redirected. The socket is asked for again with each look.
    let v6 = socket(Ipv6Addr::LOCALHOST.into(), mark).ok();
    Ok([Some(v4), v6].into_iter().flatten().collect())
}

fn socket(ip: IpAddr, mark: u32) -> io::Result<OwnedFd> {
    // The address can be bound while loopback is down, when no peer can reach it. This connect asks for a route and sends
    // nothing.
    let anything = SocketAddr::new(ip, 9);
    Socket::new(Domain::for_address(anything), Type::DGRAM, None)?.connect(&anything.into())?;
    let address = SocketAddr::new(ip, 0);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if ip.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if mark != 0 {
        socket.set_mark(mark)?;
    }
    socket.bind(&address.into())?;
    Ok(socket.into())
}

fn short(path: &std::path::Path) -> String {
    clip(&path.to_string_lossy().replace(['\t', '\n'], "?"))
}

fn clip(text: &str) -> String {
    text.chars().take(TEXT_BYTES_MAX / 4).collect()
}
