//! Budgets for tunnels whose readers pause: the isolation flags, fitted to the memory of this process.

use std::sync::Arc;
use std::time::Duration;

use adit_core::session::{Isolation, MemoryBounds, ProcessBudget, TunnelKind};

use adit_config::limits;
use adit_config::plan::IsolationPlan;
use adit_host::memory;
use adit_telemetry::AditMetrics;

/// The core's view of the isolation flags.
pub(super) fn isolation(plan: &IsolationPlan) -> Isolation {
    Isolation {
        tunnel_share_bytes: plan.tunnel_share_bytes,
        link_budget_bytes: plan.agent_budget_bytes,
        stall_timeout: plan.stall_timeout,
        half_closed_timeout: plan.half_closed_timeout,
        linger_timeout: limits::LINGER_TIMEOUT,
    }
}

/// The isolation flags, reduced to the memory that this process may use.
pub(super) fn isolation_here(plan: &IsolationPlan) -> IsolationPlan {
    fitted(plan, memory::limit)
}

/// Without `--process-budget`, all tunnels together get a share of the memory, or one link's budget if that is more. The
/// cap is half of the memory: the limits in manifests of upstream's programs are below one link's budget, and the kernel
/// would kill the process before a budget was full.
fn fitted(plan: &IsolationPlan, memory: impl FnOnce() -> u64) -> IsolationPlan {
    if plan.process_budget_bytes.is_some() {
        return *plan;
    }
    let memory = memory();
    let half = (memory / 2).max(limits::TUNNEL_SHARE_BYTES_MIN);
    let link = plan.agent_budget_bytes.min(half);
    IsolationPlan {
        tunnel_share_bytes: plan.tunnel_share_bytes.min(link),
        agent_budget_bytes: link,
        process_budget_bytes: Some((memory / limits::PROCESS_BUDGET_DIVISOR).max(link)),
        ..*plan
    }
}

/// Budget of the process for readers that pause, of the plan that [`isolation_here`] returned.
pub(super) fn process_budget(plan: &IsolationPlan) -> Arc<ProcessBudget> {
    let bytes = plan.process_budget_bytes.unwrap_or(plan.agent_budget_bytes);
    let memory = memory::limit();
    let socket = socket_buffer_kib_max(memory);
    let bounds = match memory::of_cgroup() {
        Some((limit, _folder)) => bounds_within(limit, memory::counts_tcp()),
        None => MemoryBounds {
            room_bytes: room_bytes(memory),
            growth_bytes: 0,
            counts_tcp: true,
        },
    };
    let budget = ProcessBudget::new(bytes).with_socket_buffers(socket);
    Arc::new(budget.with_bounds(Some(bounds)))
}

/// Bytes of the memory that tunnels may take: the rest is the process's own, and what the allocator and the kernel add.
fn room_bytes(memory: u64) -> u64 {
    let own = limits::OWN_BYTES.min(memory / 2);
    memory - own - memory / limits::UNPROMISED_DIVISOR
}

/// The division of a cgroup's memory. `counts_tcp`: its limit covers the buffers of TCP sockets, so those of lanes have a
/// part of their own.
fn bounds_within(limit: u64, counts_tcp: bool) -> MemoryBounds {
    let kib =
        u64::from(socket_buffer_kib_max(limit).unwrap_or(limits::SOCKET_BUFFER_BOUND_KIB_MAX));
    let (lanes, sockets) = if counts_tcp { (1, 4) } else { (0, 2) };
    let room = room_bytes(limit);
    MemoryBounds {
        room_bytes: room - lanes * room / limits::LANES_MEMORY_DIVISOR,
        counts_tcp,
        growth_bytes: sockets * kib.min(limits::SOCKET_GROWTH_KIB_MAX) * limits::KIB,
    }
}

/// Most open tunnels that this memory can promise: of clients with a socket each, and of gRPC clients.
pub(super) fn tunnels_max(memory: u64) -> [u64; 2] {
    let room = bounds_within(memory, memory::counts_tcp()).room_bytes;
    [TunnelKind::Socket, TunnelKind::Grpc].map(|kind| room / kind.promised_bytes())
}

/// Most lanes that the memory can hold, where its limit covers the buffers of TCP sockets.
pub(super) fn lanes_max() -> usize {
    let limit = memory::of_cgroup().filter(|_limit| memory::counts_tcp());
    limit.map_or(usize::MAX, |(limit, _folder)| {
        let lanes = room_bytes(limit) / limits::LANES_MEMORY_DIVISOR / limits::LANE_BYTES;
        usize::try_from(lanes).unwrap_or(usize::MAX)
    })
}

/// KiB that the kernel may book in each direction for a tunnel's socket, so that receive windows fit the memory. `None`
/// with ample memory: the kernel decides.
pub(super) fn socket_buffer_kib_max(memory: u64) -> Option<u16> {
    let share = memory / limits::SOCKET_BUFFER_DIVISOR / limits::KIB;
    let share = u16::try_from(share).ok()?;
    (share < limits::SOCKET_BUFFER_BOUND_KIB_MAX)
        .then_some(share.max(limits::SOCKET_BUFFER_KIB_MIN))
}

/// Publishes the size of the process budget and the bytes in use, once a second.
pub(super) async fn keep_published(metrics: AditMetrics, budget: Arc<ProcessBudget>) {
    let mut every = tokio::time::interval(Duration::from_secs(1));
    loop {
        every.tick().await;
        metrics.process_budget.set(budget.max_bytes());
        metrics.held_bytes.set(budget.held_bytes());
        metrics.queued_bytes.set(budget.queued_bytes());
        metrics.kernel_bytes.set(budget.kernel_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (memory): Bytes held by the process (`--process-budget`)
    #[test]
    fn the_process_budget_defaults_to_a_quarter_of_the_memory() {
        let plan = |process_budget_bytes| IsolationPlan {
            process_budget_bytes,
            ..IsolationPlan::default()
        };
        for (flag, memory, expected) in [
            (None, 8 << 30, 2 << 30),
            // At least one link's budget, which is 64 MiB unless set as well.
            (None, 200 << 20, 64 << 20),
            (Some(1 << 30), 8 << 30, 1 << 30),
            (Some(64 << 20), 30 << 20, 64 << 20),
        ] {
            let here = fitted(&plan(flag), || memory);
            assert_eq!(process_budget(&here).max_bytes(), expected);
            assert_eq!(here.agent_budget_bytes, 64 << 20);
        }
    }

    /// The floors of the sizing page, by what one tunnel is promised.
    #[test]
    fn small_limits_hold_the_promised_numbers_of_tunnels() {
        for (limit, kind, tunnels) in [
            (64 << 20, TunnelKind::Grpc, 200),
            (256 << 20, TunnelKind::Grpc, 1000),
            (512 << 20, TunnelKind::Socket, 4000),
        ] {
            for counts_tcp in [false, true] {
                let bounds = bounds_within(limit, counts_tcp);
                let holds = bounds.room_bytes / kind.promised_bytes();
                assert!(holds >= tunnels, "{limit} {counts_tcp}: {holds}");
                assert!(bounds.growth_bytes > 0 && bounds.room_bytes < limit);
            }
        }
        assert_eq!(room_bytes(0), 0);
    }

    /// Limit (memory): Memory of the cgroup, without pages of files
    #[test]
    fn sockets_are_bounded_where_memory_is_small() {
        for (memory, expected) in [
            (64 << 20, Some(128)),
            (256 << 20, Some(512)),
            ((512 << 20) - 1, Some(1023)),
            (512 << 20, None),
            (1 << 42, None),
            (0, Some(128)),
        ] {
            assert_eq!(socket_buffer_kib_max(memory), expected, "{memory}");
        }
    }

    /// Limit (memory): Bytes held by the process (`--process-budget`)
    #[test]
    fn budgets_leave_half_of_the_memory_to_the_process() {
        for (memory, link, share) in [
            (128 << 20, 64 << 20, 4 << 20),
            (100 << 20, 50 << 20, 4 << 20),
            (30 << 20, 15 << 20, 4 << 20),
            (6 << 20, 3 << 20, 3 << 20),
            (0, 64 << 10, 64 << 10),
        ] {
            let here = fitted(&IsolationPlan::default(), || memory);
            assert_eq!(here.agent_budget_bytes, link);
            assert_eq!(here.tunnel_share_bytes, share);
            assert_eq!(process_budget(&here).max_bytes(), link);
        }
    }
}
