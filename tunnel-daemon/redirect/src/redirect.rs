//! The redirect as a whole: programs on a cgroup, rules, listeners, exempt sockets, and original destinations.

use std::fs::Metadata;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Mutex;

use adit_ebpf_abi::{
    ACTION_JOIN, ACTION_LEAVE, ACTION_REDIRECT, AF_INET, ArrivalKey, CALL_OUTCOMES, Endpoint,
    FLAG_DENY, FLAG_HOME, Listener, ListenerKey, NODE_COOKIE, Rule, RuleKey,
};
use adit_net::self_sockets::SocketExemptions;
use ipnet::IpNet;
use rustix::time::{ClockId, clock_gettime};

use crate::attach::{Attached, open_cgroup};
use crate::generations::Generations;
use crate::maps::{self, ExemptSockets, RedirectMaps};
use crate::object::{KernelError, load};
use crate::other_programs::{OtherPrograms, other_programs};
use crate::processes::{self, Life, Processes};
use crate::{netns, pins};

/// Number of the listener that marks the network namespace of [`Redirect::at_home`]. No rule sends calls to it.
const HOME: u32 = u32::MAX;

/// What happens to connect calls to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They are not redirected.
    Leave,
    /// They are not redirected, and the calling process becomes part of the tunnel: from then on none of its calls are
    /// redirected.
    Join,
    /// As [`Action::Join`], for calls from the network namespace of [`Redirect::at_home`]; calls from others are not
    /// redirected.
    JoinAtHome,
    /// They go to this listener; without one they are not redirected.
    Redirect(u32),
    /// They go to this listener; without one they fail.
    RedirectOrDeny(u32),
}

/// What happens to calls to a network, on one port or on all. The longest prefix wins; of two equally long ones, the one
/// with the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedirectRule {
    /// Networks that hold only IPv4-mapped addresses are IPv4 networks.
    pub network: IpNet,
    /// `None`: all ports.
    pub port: Option<u16>,
    /// What to do.
    pub action: Action,
}

impl RedirectRule {
    /// The rule as the map holds it, in a generation of rules.
    pub(super) fn entry(&self, generation: u8) -> (RuleKey, Rule) {
        let (ip, prefix_bits) = plain(self.network);
        let to = endpoint(SocketAddr::new(ip, self.port.unwrap_or(0)));
        let key = RuleKey::of(&to, generation);
        let (action, listener, flags) = match self.action {
            Action::Leave => (ACTION_LEAVE, 0, 0),
            Action::Join => (ACTION_JOIN, 0, 0),
            Action::JoinAtHome => (ACTION_JOIN, HOME, FLAG_HOME),
            Action::Redirect(listener) => (ACTION_REDIRECT, listener, 0),
            Action::RedirectOrDeny(listener) => (ACTION_REDIRECT, listener, FLAG_DENY),
        };
        let rule = Rule {
            prefix_bits,
            action,
            listener,
            flags,
        };
        (key, rule)
    }
}

/// First address and prefix length, as IPv4 where all of it is mapped.
fn plain(network: IpNet) -> (IpAddr, u32) {
    let (ip, bits) = (network.network(), u32::from(network.prefix_len()));
    match ip {
        IpAddr::V6(v6) if bits >= 96 => match v6.to_ipv4_mapped() {
            Some(v4) => (v4.into(), bits - 96),
            None => (ip, bits),
        },
        _ => (ip, bits),
    }
}

/// An address as maps hold it.
#[must_use]
pub fn endpoint(address: SocketAddr) -> Endpoint {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => Endpoint::v4(v4.octets(), address.port()),
        IpAddr::V6(v6) => Endpoint::v6(v6.octets(), address.port()),
    }
}

/// An address from what a map holds.
#[must_use]
pub fn address(endpoint: &Endpoint) -> SocketAddr {
    let ip: IpAddr = if endpoint.family == AF_INET {
        let [a, b, c, d, ..] = endpoint.ip;
        [a, b, c, d].into()
    } else {
        endpoint.ip.into()
    };
    SocketAddr::new(ip, endpoint.port)
}

/// Programs on a cgroup and their maps. Dropping it removes all but pinned programs from the kernel.
pub struct Redirect {
    /// Device and inode of the cgroup.
    cgroup: (u64, u64),
    maps: Mutex<RedirectMaps>,
    /// Locked alone.
    exempt: Mutex<ExemptSockets>,
    /// Locked before the maps.
    rules: Mutex<Generations>,
    /// Locked before the maps.
    processes: Mutex<Processes>,
    attached: Mutex<Attached>,
    /// Links keep programs loaded; the object is kept so that nothing depends on that.
    object: Mutex<aya::Ebpf>,
}

impl Redirect {
    /// Loads the programs of `object` and attaches them to a cgroup. Nothing is redirected until there are a listener and a
    /// rule.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub fn attach(object: &[u8], cgroup: &Path) -> Result<Self, KernelError> {
        let path = cgroup;
        let cgroup = open_cgroup(path)?;
        let identity = identity(cgroup.metadata()).map_err(|cause| KernelError::Cgroup {
            path: path.display().to_string(),
            cause: cause.to_string(),
        })?;
        let mut ebpf = load(object)?;
        let maps = RedirectMaps::take(&mut ebpf)?;
        let exempt = ExemptSockets::take(&mut ebpf)?;
        let mut attached = Attached::default();
        // First the programs that note and hide destinations: a redirected call needs both.
        attached.sock_ops(&mut ebpf, "adit_redirect_ops", &cgroup)?;
        attached.sock_addr(&mut ebpf, "adit_getpeername4", &cgroup)?;
        attached.sock_addr(&mut ebpf, "adit_getpeername6", &cgroup)?;
        attached.sock_addr(&mut ebpf, "adit_connect4", &cgroup)?;
        attached.sock_addr(&mut ebpf, "adit_connect6", &cgroup)?;
        Ok(Self {
            cgroup: identity,
            maps: Mutex::new(maps),
            exempt: Mutex::new(exempt),
            rules: Mutex::default(),
            processes: Mutex::default(),
            attached: Mutex::new(attached),
            object: Mutex::new(ebpf),
        })
    }

    /// Whether the cgroup at `path` is the one that the programs are on. Programs go with their cgroup when it is removed,
    /// even if another cgroup takes its name at once.
    #[must_use]
    pub fn is_on(&self, path: &Path) -> bool {
        identity(std::fs::metadata(path)).is_ok_and(|identity| identity == self.cgroup)
    }

    /// Keeps the redirecting programs attached when this process ends, however it ends: destinations of denying rules are
    /// then out of reach. Replaces the pins of an earlier process.
    ///
    /// # Errors
    /// There is no bpffs, or the kernel refused.
    pub fn pin(&self, cgroup: &Path) -> Result<(), KernelError> {
        let failed = |cause: String| KernelError::Pin {
            path: cgroup.display().to_string(),
            cause,
        };
        let folder = pins::folder(cgroup).map_err(failed)?;
        let fresh = pins::beside(&folder);
        pins::emptied(&fresh).map_err(|error| failed(error.to_string()))?;
        let pin = || {
            maps::locked(&self.attached).pin(&["adit_connect4", "adit_connect6"], &fresh)?;
            // Only now: if anything above fails, the pins of an earlier process go on denying.
            pins::replaced(&folder, &fresh).map_err(|error| failed(error.to_string()))
        };
        let pinned = pin();
        if pinned.is_err() {
            // Where nothing is redirected, the new pins would deny for ever.
            pins::given_up(&fresh);
        }
        pins::sweep();
        pinned
    }

    fn maps(&self) -> std::sync::MutexGuard<'_, RedirectMaps> {
        maps::locked(&self.maps)
    }

    /// Number of attached programs.
    #[must_use]
    pub fn programs(&self) -> usize {
        maps::locked(&self.attached).count()
    }

    /// Foreign programs that run beside these on the cgroup at that path. To be called while there is CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The kernel does not list them: there may be some.
    pub fn other_programs(&self, cgroup: &Path) -> io::Result<OtherPrograms> {
        let object = maps::locked(&self.object);
        let own: Vec<u32> = object
            .programs()
            // Programs that are not loaded have no number.
            .filter_map(|(_name, program)| Some(program.info().ok()?.id()))
            .collect();
        other_programs(cgroup, &own)
    }

    /// Detaches all programs but pinned ones from the cgroup: without pins no call is redirected from now on.
    pub fn detach(&self) {
        *maps::locked(&self.attached) = Attached::default();
    }

    /// Registers the listener `number`: calls from the network namespace of `socket` go to these addresses, by the family
    /// of their destination.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_listener(
        &self,
        number: u32,
        socket: &impl AsFd,
        v4: Option<SocketAddr>,
        v6: Option<SocketAddr>,
    ) -> Result<(), KernelError> {
        self.set_marked_listener(number, socket, v4, v6, 0)
    }

    /// As [`Redirect::set_listener`], with the `SO_MARK` of the listener's sockets: a later listener without the right to
    /// set marks does not count as this one. 0 is none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_marked_listener(
        &self,
        number: u32,
        socket: &impl AsFd,
        v4: Option<SocketAddr>,
        v6: Option<SocketAddr>,
        mark: u32,
    ) -> Result<(), KernelError> {
        let cookie = netns::cookie(socket).map_err(KernelError::Namespace)?;
        self.note_listener(cookie, number, v4, v6, mark)
    }

    /// Registers the network namespace of `socket` as the one of [`Action::JoinAtHome`].
    ///
    /// # Errors
    /// The kernel's error.
    pub fn at_home(&self, socket: &impl AsFd) -> Result<(), KernelError> {
        self.set_listener(HOME, socket, None, None)
    }

    /// Registers where calls go from namespaces without a listener `number`: addresses of this node that they can reach.
    /// From these namespaces the programs cannot check that the listener exists. So it is registered only while it does,
    /// and never with programs that outlive this process.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_node_listener(
        &self,
        number: u32,
        v4: Option<SocketAddr>,
        v6: Option<SocketAddr>,
    ) -> Result<(), KernelError> {
        self.note_listener(NODE_COOKIE, number, v4, v6, 0)
    }

    fn note_listener(
        &self,
        netns_cookie: u64,
        listener: u32,
        v4: Option<SocketAddr>,
        v6: Option<SocketAddr>,
        mark: u32,
    ) -> Result<(), KernelError> {
        let key = ListenerKey {
            netns_cookie,
            listener,
            reserved: 0,
        };
        let of = |address: Option<SocketAddr>| address.map_or(Endpoint::NONE, endpoint);
        let listener = Listener {
            v4: of(v4),
            v6: of(v6),
            mark,
        };
        self.maps().set_listener(key, listener)
    }

    /// Forgets the listener `number` of a network namespace: calls from there are not redirected, or denied, from now on.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove_listener(&self, netns_cookie: u64, number: u32) -> Result<(), KernelError> {
        self.maps().remove_listener(ListenerKey {
            netns_cookie,
            listener: number,
            reserved: 0,
        })
    }

    /// Adds or replaces rules that are part of every set of [`Redirect::replace_rules`].
    ///
    /// # Errors
    /// There is no room for more.
    pub fn set_rules(&self, rules: &[RedirectRule]) -> Result<(), KernelError> {
        maps::locked(&self.rules).keep(&self.maps, rules)
    }

    /// Activates these rules in place of the set before, and returns the number of sets so far. Each call sees all of one
    /// set.
    ///
    /// # Errors
    /// There is no room for them; the set before stays active.
    pub fn replace_rules(&self, rules: &[RedirectRule]) -> Result<u64, KernelError> {
        maps::locked(&self.rules).replace(&self.maps, rules)
    }

    /// Forgets joined processes that have ended, so that a new process with the same id does not count as joined; returns
    /// how many. Each run also finds ids that were reused since the run before. Reads `/proc`, so it blocks for moments.
    ///
    /// # Errors
    /// `/proc` cannot be read, or the kernel refused; the next run forgets the rest.
    pub fn forget_ended(&self) -> Result<usize, KernelError> {
        processes::visible().map_err(KernelError::Processes)?;
        let mut seen = maps::locked(&self.processes);
        // Accepting a connection needs the maps, and must not wait for files.
        let noted = self.maps().processes()?;
        let over = seen.over(&noted, Life::of);
        for id in &over {
            self.maps().forget_process(*id)?;
            seen.forgotten(*id);
        }
        Ok(over.len())
    }

    /// The original destination of the connection that `accept` reported as coming from `client`. Given once, then
    /// forgotten.
    ///
    /// # Errors
    /// The kernel refused. An unknown destination is `None`, not an error.
    pub fn origin(
        &self,
        accepted: &impl AsFd,
        client: SocketAddr,
    ) -> io::Result<Option<SocketAddr>> {
        self.origin_under(netns::cookie(accepted)?, client)
    }

    /// As [`Redirect::origin`], of a connection to the node's address.
    ///
    /// # Errors
    /// As of [`Redirect::origin`].
    pub fn origin_at_node(&self, client: SocketAddr) -> io::Result<Option<SocketAddr>> {
        self.origin_under(NODE_COOKIE, client)
    }

    fn origin_under(
        &self,
        netns_cookie: u64,
        client: SocketAddr,
    ) -> io::Result<Option<SocketAddr>> {
        let key = ArrivalKey {
            netns_cookie,
            client: endpoint(client),
            reserved: 0,
        };
        let found = self
            .maps()
            .take_arrival(key, monotonic_ns())
            .map_err(io::Error::other)?;
        Ok(found.map(|arrival| address(&arrival.destination)))
    }

    /// Redirected connections that are not accepted yet.
    #[must_use]
    pub fn arrivals_waiting(&self) -> usize {
        self.maps().arrivals_waiting()
    }

    /// Calls so far, with the names of their outcomes.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn calls(&self) -> Result<Vec<(&'static str, u64)>, KernelError> {
        let sums = self.maps().calls()?;
        Ok(CALL_OUTCOMES
            .iter()
            .zip(sums)
            .map(|((_, name), sum)| (*name, sum))
            .collect())
    }
}

fn identity(metadata: io::Result<Metadata>) -> io::Result<(u64, u64)> {
    metadata.map(|metadata| (metadata.dev(), metadata.ino()))
}

/// Removes the pins of an earlier process for a cgroup, if any, and those for cgroups that are gone.
///
/// # Errors
/// The file system refused.
pub fn unpin(cgroup: &Path) -> io::Result<()> {
    pins::sweep();
    match pins::folder(cgroup) {
        Ok(folder) => pins::cleared(&folder),
        // Without bpffs there are no pins.
        Err(_nowhere) => Ok(()),
    }
}

/// The clock that programs read (`bpf_ktime_get_ns`).
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds * 1_000_000_000 + nanoseconds
}

impl SocketExemptions for Redirect {
    fn exempt(&self, cookie: u64) -> io::Result<()> {
        let noted = maps::locked(&self.exempt).note(cookie);
        noted.map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_networks_are_ipv4_networks() {
        let rule = |network: &str| RedirectRule {
            network: network.parse().unwrap(),
            port: Some(443),
            action: Action::Redirect(1),
        };
        assert_eq!(
            rule("::ffff:10.0.0.0/104").entry(0),
            rule("10.0.0.0/8").entry(0)
        );
        // `::/0` covers IPv6 only, and no IPv4.
        assert_eq!(rule("::/0").entry(0).1.prefix_bits, 0);
        assert_ne!(rule("::/0").entry(0).0, rule("0.0.0.0/0").entry(0).0);
    }

    #[test]
    fn addresses_round_trip() {
        for text in ["10.1.2.3:443", "[2001:db8::1]:65535"] {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(address(&endpoint(socket)), socket);
        }
    }
}
