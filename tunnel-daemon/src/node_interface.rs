//! `adit node-interface`: an interface that gives a host an address at which its agent listens.
//!
//! Each address has an interface of its own, named after the address and marked by its alias. Interfaces without this mark are
//! never changed. Nothing counts who uses an interface: where several agents may follow each other, as in pods, nobody removes it.

use std::io;
use std::net::IpAddr;
use std::process::ExitCode;

use adit_config::NodeInterfaceOptions;
use adit_host::rtnetlink::{Link, Rtnetlink};
use anyhow::Context as _;
use rustix::io::Errno;

use crate::status::text::show;

/// Kind of the interfaces.
const KIND: &str = "dummy";

/// Makes or removes an interface, and says which.
///
/// # Errors
/// See [`add`] and [`remove`].
pub(crate) fn run(options: &NodeInterfaceOptions) -> anyhow::Result<ExitCode> {
    let done = match options {
        NodeInterfaceOptions::Add(options) => add(KIND, options.address)?,
        NodeInterfaceOptions::Remove(options) => remove(options.address)?,
    };
    show(&format!("{done}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Makes the interface of an address, unless it is there. `kind`: tests of kernels without `dummy` take another one.
///
/// # Errors
/// Another interface has the address or the name, or the privilege is missing.
pub fn add(kind: &str, address: IpAddr) -> anyhow::Result<String> {
    let name = name(address);
    let mut kernel = open()?;
    let found = own(&mut kernel, &name, address)?;
    let owners = kernel.owners(address).context("cannot list addresses")?;
    let other = |index: &&u32| found.as_ref().is_none_or(|link| link.index != **index);
    if let Some(other) = owners.iter().find(other) {
        let other = kernel.name(*other)?;
        anyhow::bail!(
            "{address} is an address of the interface {other} already: no interface needs to be made; drop this command"
        );
    }
    let link = match &found {
        Some(link) => link.clone(),
        None => make(&mut kernel, kind, &name, address)?,
    };
    if let Err(error) = kernel.set_up(link.index, address) {
        if found.is_none() {
            // The error above is the reason. What stays has the mark, so a later call can remove it.
            let _removed = kernel.remove_link(link.index);
        }
        let lacks_ipv6 =
            address.is_ipv6() && Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP);
        let told = if lacks_ipv6 {
            anyhow::Error::new(error).context("this kernel has no IPv6")
        } else {
            told(error)
        };
        return Err(told).with_context(|| format!("cannot give {address} to {name}"));
    }
    Ok(if owners.is_empty() {
        format!("{address} is an address of this host now, on the interface {name}")
    } else {
        format!("{address} was an address of this host already, on the interface {name}")
    })
}

/// Removes the interface of an address, if it is there.
///
/// # Errors
/// The interface of this name was not made by [`add`], or the privilege is missing.
pub fn remove(address: IpAddr) -> anyhow::Result<String> {
    let name = name(address);
    let mut kernel = open()?;
    let Some(link) = own(&mut kernel, &name, address)? else {
        return Ok(format!("there is no interface {name} of {address}"));
    };
    match kernel.remove_link(link.index) {
        // Another process was faster.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => (),
        removed => removed
            .map_err(told)
            .with_context(|| format!("cannot remove the interface {name} of {address}"))?,
    }
    Ok(format!("the interface {name} of {address} is removed"))
}

fn open() -> anyhow::Result<Rtnetlink> {
    Rtnetlink::open().context("cannot ask the kernel for interfaces: allow sockets of AF_NETLINK")
}

/// The interface that [`add`] made for an address.
///
/// # Errors
/// An interface has the name, but not the mark.
fn own(kernel: &mut Rtnetlink, name: &str, address: IpAddr) -> anyhow::Result<Option<Link>> {
    let found = kernel.link(name);
    let found = found.with_context(|| format!("cannot look for the interface {name}"))?;
    if let Some(link) = &found {
        anyhow::ensure!(
            link.alias == alias(address),
            "the interface {name} was not made by adit node-interface for {address}, since its alias is {:?}: it stays as it \
             is; remove or rename it yourself",
            link.alias
        );
    }
    Ok(found)
}

fn make(kernel: &mut Rtnetlink, kind: &str, name: &str, address: IpAddr) -> anyhow::Result<Link> {
    match kernel.add_link(kind, name, &alias(address)) {
        // Another process was faster. The name is made of the address, so it was one of ours.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::EXIST) => (),
        made => made
            .map_err(told)
            .with_context(|| format!("cannot make the interface {name} for {address}"))?,
    }
    own(kernel, name, address)?.with_context(|| format!("the interface {name} is gone again"))
}

/// What to do about an error of the kernel.
fn told(error: io::Error) -> anyhow::Error {
    let remedy = match Errno::from_io_error(&error) {
        Some(Errno::PERM) => {
            "it takes CAP_NET_ADMIN: in a pod add NET_ADMIN to the capabilities of a container of user 0 on the host's network, \
             in a systemd unit write + before the command"
        }
        Some(Errno::OPNOTSUPP) => "load the kernel's module dummy",
        Some(Errno::ACCESS) => "IPv6 is off here: sysctl net.ipv6.conf.all.disable_ipv6=0",
        _ => return error.into(),
    };
    anyhow::Error::new(error).context(remedy)
}

/// The mark.
fn alias(address: IpAddr) -> String {
    format!("adit node-interface {address}")
}

/// At most 15 bytes, as the kernel wants; the same for an address at each call.
#[must_use]
pub fn name(address: IpAddr) -> String {
    let octets = match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    // FNV-1a. Two addresses with one name are no danger: the mark has the whole address.
    let hash = octets.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("adit-{:010x}", hash >> 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable_and_short_enough_for_the_kernel() {
        let names =
            ["192.0.2.10", "192.0.2.11", "fd00::10"].map(|text| name(text.parse().unwrap()));
        assert_eq!(
            names,
            ["adit-492d42c046", "adit-492d41c046", "adit-c3c96a9eb8"]
        );
    }
}
