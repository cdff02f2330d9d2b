//! The redirect as one thing: programs on a cgroup, rules, listeners, exempt sockets, and where a connection wanted to go.

use std::fs::Metadata;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

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
use crate::other_programs::{Neighbours, neighbours};
use crate::processes::{self, Life, Processes};
use crate::{netns, pins};

/// The listener that is noted in the network namespace of [`Redirect::at_home`] alone, and that no rule sends to.
const HOME: u32 = u32::MAX;

/// What becomes of calls to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They go where they go.
    Leave,
    /// They go where they go, and the process that makes one is part of the tunnel: none of its calls are redirected from
    /// then on.
    Join,
    /// As [`Action::Join`], of calls from the network namespace of [`Redirect::at_home`]; those from others go where they go.
    JoinAtHome,
    /// They go to this listener; without one, where they go.
    Redirect(u32),
    /// They go to this listener; without one they fail.
    RedirectOrDeny(u32),
}

/// Calls to a network, on one port or on all, and what becomes of them. The longest prefix wins; of two that are as long,
/// the one with the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedirectRule {
    /// Networks that hold only IPv4-mapped addresses are IPv4 networks.
    pub network: IpNet,
    /// `None`: all.
    pub port: Option<u16>,
    /// What to do.
    pub action: Action,
}

impl RedirectRule {
    /// As the map holds it, in a generation of rules.
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

/// Programs on a cgroup and their maps. Dropping it takes all of it out of the kernel.
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
    /// Programs stay loaded as long as links hold them; the object itself is kept so that nothing depends on that.
    object: Mutex<aya::Ebpf>,
}

impl Redirect {
    /// Loads the programs of `object` and attaches them to a cgroup. Nothing is redirected before there are a listener and a
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
        // What tells and hides first: a call that is redirected finds both there.
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

    /// Whether the cgroup at that path is the one that the programs are on. They go with it when it is removed, also if another
    /// one has its name at once.
    #[must_use]
    pub fn is_on(&self, path: &Path) -> bool {
        identity(std::fs::metadata(path)).is_ok_and(|identity| identity == self.cgroup)
    }

    /// Keeps the programs that redirect attached when this process ends, however it ends: with rules that deny, what they name
    /// is out of reach then. What an earlier process had left there is let go first.
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
            self.attached
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pin(&["adit_connect4", "adit_connect6"], &fresh)?;
            // Only now: whatever fails above, what an earlier process had left denies on.
            pins::replaced(&folder, &fresh).map_err(|error| failed(error.to_string()))
        };
        let pinned = pin();
        if pinned.is_err() {
            // Where nothing is redirected, what is pinned there would deny for ever.
            pins::given_up(&fresh);
        }
        pins::sweep();
        pinned
    }

    fn maps(&self) -> std::sync::MutexGuard<'_, RedirectMaps> {
        maps::locked(&self.maps)
    }

    /// Programs attached.
    #[must_use]
    pub fn programs(&self) -> usize {
        maps::locked(&self.attached).count()
    }

    /// Programs of others that run beside these, on the cgroup at that path. To be asked while there is CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The kernel does not tell: there may be some.
    pub fn neighbours(&self, cgroup: &Path) -> io::Result<Neighbours> {
        let object = maps::locked(&self.object);
        let own: Vec<u32> = object
            .programs()
            // Those that are not loaded have none.
            .filter_map(|(_name, program)| Some(program.info().ok()?.id()))
            .collect();
        neighbours(cgroup, &own)
    }

    /// Takes the programs off the cgroup: from now on calls go where they go.
    pub fn detach(&self) {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        *attached = Attached::default();
    }

    /// Notes the listener `number`: callers in the network namespace of `socket` are sent to these addresses, by the
    /// family of their destination.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn set_listener(
        &self,
        number: u32,
        socket: &impl AsFd,
        v4: Option<SocketAddr>,
        v6: Option<SocketAddr>,
    ) -> Result<(), KernelError> {
        self.set_marked_listener(number, socket, v4, v6, 0)
    }

    /// As [`Redirect::set_listener`], with the `SO_MARK` that its sockets bear: whoever listens there later, without the right
    /// to set one, is not it. 0 is none.
    ///
    /// # Errors
    /// What the kernel said.
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

    /// Notes the network namespace of `socket` as the one that [`Action::JoinAtHome`] is about.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn at_home(&self, socket: &impl AsFd) -> Result<(), KernelError> {
        self.set_listener(HOME, socket, None, None)
    }

    /// Notes where callers whose namespace has no listener `number` are sent: addresses of this node that they can reach.
    /// Nobody can tell from their namespace whether something listens there, so it is noted only while it does, and never with
    /// programs that outlive this process.
    ///
    /// # Errors
    /// What the kernel said.
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

    /// Forgets the listener `number` of a network namespace: calls from there are left alone or denied from now on.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn remove_listener(&self, netns_cookie: u64, number: u32) -> Result<(), KernelError> {
        self.maps().remove_listener(ListenerKey {
            netns_cookie,
            listener: number,
            reserved: 0,
        })
    }

    /// Adds or replaces rules that stay in force whatever sets of [`Redirect::replace_rules`] come.
    ///
    /// # Errors
    /// There is no room for more.
    pub fn set_rules(&self, rules: &[RedirectRule]) -> Result<(), KernelError> {
        let mut generations = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        generations.keep(&self.maps, rules)
    }

    /// Puts these rules in force in place of the set before, and says the how many-th set it is. Each call sees all of one
    /// set.
    ///
    /// # Errors
    /// There is no room for them; the set before stays in force.
    pub fn replace_rules(&self, rules: &[RedirectRule]) -> Result<u64, KernelError> {
        let mut generations = self.rules.lock().unwrap_or_else(PoisonError::into_inner);
        generations.replace(&self.maps, rules)
    }

    /// Forgets processes that joined and have ended, so that none that is given the id of one is taken for it, and says how
    /// many. Each look finds also those whose ids were given away since the look before. Reads `/proc`, so it blocks for
    /// moments.
    ///
    /// # Errors
    /// `/proc` does not tell, or the kernel refused; those that are not forgotten are at the next look.
    pub fn forget_ended(&self) -> Result<usize, KernelError> {
        processes::visible().map_err(KernelError::Processes)?;
        let mut seen = self
            .processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Whoever accepts a connection needs the maps, and does not wait for files.
        let noted = self.maps().processes()?;
        let over = seen.over(&noted, Life::of);
        for id in &over {
            self.maps().forget_process(*id)?;
            seen.forgotten(*id);
        }
        Ok(over.len())
    }

    /// Where the connection that `accept` showed as coming from `client` wanted to go. Once: the answer is forgotten.
    ///
    /// # Errors
    /// The kernel refused; never because nothing is known, which is `None`.
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
    /// As there.
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

    /// Redirected connections that nobody has accepted yet.
    #[must_use]
    pub fn arrivals_waiting(&self) -> usize {
        self.maps().arrivals_waiting()
    }

    /// Calls so far, with the names of what became of them.
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

/// Lets go of what an earlier process pinned for a cgroup, if anything, and for cgroups that are gone.
///
/// # Errors
/// The file system refused.
pub fn unpin(cgroup: &Path) -> io::Result<()> {
    pins::sweep();
    match pins::folder(cgroup) {
        Ok(folder) => pins::cleared(&folder),
        // No such file system, no pins.
        Err(_nowhere) => Ok(()),
    }
}

/// The clock programs read.
fn monotonic_ns() -> u64 {
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
        // Wider than all of IPv4: IPv6, and none of IPv4.
        assert_eq!(rule("::/0").entry(0).1.prefix_bits, 0);
        assert_ne!(rule("::/0").entry(0).0, rule("0.0.0.0/0").entry(0).0);
    }

    #[test]
    fn addresses_come_back() {
        for text in ["10.1.2.3:443", "[2001:db8::1]:65535"] {
            let socket: SocketAddr = text.parse().unwrap();
            assert_eq!(address(&endpoint(socket)), socket);
        }
    }
}
