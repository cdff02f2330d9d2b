//! Targets that an agent reaches through an HTTP proxy (`--target-proxy`).

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use adit::agent::RunningAgent;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::forward_proxy::{Answer, ESTABLISHED, Proxy};
use crate::support::world::World;
use crate::support::{connect, targets, tls};

/// A world whose agent reaches targets through this proxy.
async fn behind(proxy: &Proxy, flags: &[&str]) -> (World, RunningAgent) {
    let world = World::start(&[]).await;
    let proxy = format!("--target-proxy=http://{}", proxy.address);
    let agent = world.agent("proxied", &[&[&*proxy], flags].concat()).await;
    world.links(1).await;
    (world, agent)
}

/// A name needs an entry of that name, since nobody here judges what it resolves to: neither networks nor an open list do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_are_judged_before_the_proxy_is_asked() {
    let (target, _echo) = targets::local_echo().await;
    let echo = target.parse().expect("an address");
    let proxy = Proxy::start(echo, &[ESTABLISHED]).await;
    let listed = [
        "--allow-target=10.0.0.0/8",
        "--allow-target=127.0.0.0/8",
        "--allow-target=web.example:443",
    ];
    let (world, _agent) = behind(&proxy, &listed).await;
    let allowed = ["10.1.2.3:80", "[::ffff:10.1.2.4]:81", "WEB.example:443"];
    for target in allowed {
        let mut tunnel = connect::open(&world.connect(), target).await;
        connect::echo(&mut tunnel, b"through the proxy").await;
    }
    let asked = ["10.1.2.3:80", "10.1.2.4:81", "web.example:443"]
        .map(|target| format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"));
    assert_eq!(proxy.asked(), asked);
    for target in [
        "192.0.2.1:80",
        "web.example:80",
        "other.example:443",
        "169.254.169.254:80",
    ] {
        let (status, text) = connect::refused(&world.connect(), &connect::head(target)).await;
        assert!(
            status == 502 && text.contains("--allow-target"),
            "{target}: {status} {text}"
        );
    }
    // As with Go's programs, loopback needs no proxy.
    let mut tunnel = connect::open(&world.connect(), &target).await;
    connect::echo(&mut tunnel, b"directly").await;
    assert_eq!(proxy.asked().len(), allowed.len());

    let (world, _agent) = behind(&proxy, &[]).await;
    let mut tunnel = connect::open(&world.connect(), "192.0.2.1:80").await;
    connect::echo(&mut tunnel, b"an open list").await;
    let name = connect::head("web.example:443");
    let (status, text) = connect::refused(&world.connect(), &name).await;
    assert!(
        status == 502 && text.contains("--allow-target"),
        "{status} {text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_behind_a_proxy_may_speak_first() {
    const GREETING: &str = "SSH-2.0-target\r\n";
    const SPEAKS: &[Answer] = &[Answer::Tunnel(b"HTTP/1.1 200 OK\r\n\r\nSSH-2.0-target\r\n")];
    let (target, _echo) = targets::local_echo().await;
    let proxy = Proxy::start(target.parse().expect("an address"), SPEAKS).await;
    let (world, _agent) = behind(&proxy, &[]).await;
    let mut tunnel = connect::open(&world.connect(), "192.0.2.1:22").await;
    connect::hears(&mut tunnel, GREETING.as_bytes()).await;
    connect::echo(&mut tunnel, b"SSH-2.0-client\r\n").await;
}

/// A connection that was cut off must not look like one that has ended, also not through TLS to the proxy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_is_cut_off_behind_an_https_proxy_is_no_end() {
    let (port, _target) = targets::serve(|mut stream| async move {
        stream.write_all(b"half of it").await?;
        let _request = stream.read_u8().await;
        SockRef::from(&stream).set_linger(Some(Duration::ZERO))
    })
    .await;
    let world = World::start(&[]).await;
    let acceptor = tls::acceptor(&world, "server");
    let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let proxy = Proxy::start_with(target, &[ESTABLISHED], Some(acceptor)).await;
    let flags = [
        format!("--target-proxy=https://{}", proxy.address),
        format!("--proxy-ca-cert={}", world.files.ca_file().display()),
    ];
    let _agent = world
        .agent("proxied", &flags.each_ref().map(String::as_str))
        .await;
    world.links(1).await;
    let mut tunnel = connect::open(&world.connect(), "192.0.2.1:80").await;
    connect::hears(&mut tunnel, b"half of it").await;
    connect::say(&mut tunnel, b"x").await;
    world.ended("target_reset", 1.0).await;
}

/// The proxy's own failure, and its refusal, are the dial's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_of_the_targets_proxy_is_told() {
    const REFUSES: &[Answer] = &[
        Answer::Say(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"),
        Answer::Say(
            b"HTTP/1.1 407 Who?\r\nProxy-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n",
        ),
    ];
    let (_held, closed) = targets::closed_port();
    let proxy = Proxy::start(closed, REFUSES).await;
    let (world, _agent) = behind(&proxy, &[]).await;
    for told in [
        "192.0.2.1:80: the proxy answered status 403",
        "Basic realm=x): give user and password in ADIT_TARGET_PROXY",
    ] {
        let (status, text) =
            connect::refused(&world.connect(), &connect::head("192.0.2.1:80")).await;
        assert!(status == 502 && text.contains(told), "{status} {text}");
    }
}
