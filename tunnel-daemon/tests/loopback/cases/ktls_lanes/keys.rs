//! A kernel that attaches TLS to a socket, and then refuses all keys or those of one direction.
//!
//! A seccomp filter makes the kernel refuse keys with ENOMEM, once lanes are idle. Before that the kernel accepts keys, so
//! the probe at start succeeds. A filter applies to one thread, so server and agent have one thread each.

use std::collections::BTreeMap;
use std::thread;

use adit::agent;
use adit_config::plan::AgentPlan;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use super::{FRAMED, KTLS, PIPED, is_possible};
use crate::support::lanes::{BUSY, value, warm};
use crate::support::wait::within;
use crate::support::world::{World, agent_plan, echo};
use crate::support::{connect, targets};

const CLEAN: &str = "adit_tunnels_closed_total{reason=\"clean\"}";
const LOST: &str = "adit_lanes_closed_total{reason=\"lost\"}";
/// Size of one echo.
const BYTES: usize = 3_000_000;

/// The end whose kernel refuses keys.
#[derive(Clone, Copy, Debug)]
enum End {
    Server,
    Agent,
}

/// Makes the kernel refuse keys of this direction from this thread.
fn refuse_keys(way: libc::c_int) {
    let is = |argument, value: libc::c_int| {
        let value = u64::try_from(value).expect("a positive number");
        let equal = SeccompCmpOp::Eq;
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, equal, value).expect("a condition")
    };
    let keys = SeccompRule::new(vec![is(1, libc::SOL_TLS), is(2, way)]).expect("a rule");
    let no_memory = u32::try_from(libc::ENOMEM).expect("a positive number");
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_setsockopt, vec![keys])]),
        SeccompAction::Allow,
        SeccompAction::Errno(no_memory),
        std::env::consts::ARCH
            .try_into()
            .expect("a known processor"),
    )
    .expect("a filter");
    let program: BpfProgram = filter.try_into().expect("a program");
    seccompiler::apply_filter(&program).expect("a filter");
}

/// A runtime on the calling thread only, to which the filter applies.
fn runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

/// Request to the agent's thread to have keys refused, and the reply when they are.
struct Wish {
    way: libc::c_int,
    done: oneshot::Sender<()>,
}

/// Body of the agent's thread, until the sender of `wishes` is dropped.
fn play_agent(plan: &AgentPlan, mut wishes: mpsc::Receiver<Wish>) {
    runtime().block_on(async {
        let _agent = agent::start(plan).await.expect("the agent starts");
        while let Some(Wish { way, done }) = wishes.recv().await {
            refuse_keys(way);
            done.send(()).expect("the test waits");
        }
    });
}

/// Runs `test` on a server with idle lanes, after the kernel of one end began to refuse keys of one direction.
fn refused(end: End, way: libc::c_int, test: impl AsyncFnOnce(&World) + Send) {
    let (wish, wishes) = mpsc::channel(1);
    let (give, plan) = std::sync::mpsc::sync_channel(1);
    thread::scope(|scope| {
        scope.spawn(move || {
            // Without a plan the server's thread has failed with its own message.
            if let Ok(plan) = plan.recv() {
                play_agent(&plan, wishes);
            }
        });
        scope.spawn(move || {
            runtime().block_on(async move {
                let world = World::start(&[KTLS]).await;
                let port = world.server().agents.port();
                let args = world.agent_args("agent-1", port, &[KTLS]);
                give.send(agent_plan(&args).expect("flags are right"))
                    .expect("the agent's thread waits");
                world.links(1).await;
                warm(&world).await;
                match end {
                    End::Server => refuse_keys(way),
                    End::Agent => {
                        let (done, is_done) = oneshot::channel();
                        let sent = wish.send(Wish { way, done }).await;
                        assert!(sent.is_ok(), "the agent's thread has ended");
                        within("the agent's filter", is_done)
                            .await
                            .expect("the agent's thread goes on");
                    }
                }
                test(&world).await;
                drop(wish);
            });
        });
    });
}

#[test]
fn a_tunnel_uses_frames_and_loses_no_byte_if_the_agents_kernel_refuses_keys() {
    if !is_possible("keys that the agent's kernel refuses") {
        return;
    }
    refused(End::Agent, libc::TLS_TX, async |world: &World| {
        let (target, _echo) = targets::local_echo().await;
        // The second tunnel may get the same lane, whose keys the kernel refuses again.
        for round in 0..2 {
            let mut stream = connect::open(&world.connect(), &target).await;
            connect::echo(&mut stream, b"small").await;
            connect::echo_to_the_end(&mut stream, &targets::pattern(round, BYTES)).await;
            drop(stream);
            world.server_metric(BUSY, 0.0).await;
        }
        let opened = [FRAMED, PIPED].map(|series| value(world, series));
        assert_eq!(opened, [2.0, 0.0]);
        world.server_metric(CLEAN, 2.0).await;
        assert_eq!(value(world, LOST), 0.0);
    });
}

#[test]
fn a_lane_with_partly_accepted_keys_is_dropped_and_its_dial_fails() {
    if !is_possible("keys that a kernel takes in part") {
        return;
    }
    for (end, way) in [
        (End::Agent, libc::TLS_RX),
        // The agent's kernel has accepted all its keys by then.
        (End::Server, libc::TLS_TX),
        (End::Server, libc::TLS_RX),
    ] {
        refused(end, way, async move |world: &World| {
            let (target, _echo) = targets::local_echo().await;
            let (status, text) = connect::refused(&world.connect(), &connect::head(&target)).await;
            assert_eq!(status, 502, "{end:?} {way}: {text}");
            world.server_metric(LOST, 1.0).await;
            assert_eq!(value(world, PIPED), 0.0);
            // Framed tunnels still work.
            let mut tunnel = world.tunnel(&target).await;
            echo(&mut tunnel, b"on a lane of the same link").await;
            assert_eq!(value(world, LOST), 1.0);
        });
    }
}
