//! Tests of agents in the zone of the server.

use super::*;

#[test]
fn an_agent_in_the_zone_of_the_server_comes_first_among_equals_only() {
    let mut world = World::new("destHost,default");
    world.0 = world.0.with_zone(Some("east".into()));
    world.add(1, "a", "zone=west");
    world.add(2, "b", "zone=east");
    world.add(3, "c", "zone=east&host=h");
    world.add(4, "d", "host=h2");
    assert_eq!(world.choices("x:1"), [2, 3]);
    // The key ranks above the zone, and an agent that serves ranks above a draining or silent agent.
    assert_eq!(world.choices("h2:1"), [4]);
    world.drain(2);
    world.silence(3, Silence::Suspected);
    assert_eq!(world.choices("x:1"), [1, 4]);
    world.silence(3, Silence::None);
    assert_eq!(world.choices("x:1"), [3]);
    // A further attempt leaves the zone when the zone has no other agent.
    assert_eq!(world.choices_without("x:1", &[3]), [1, 4]);
    world.remove(1);
    world.remove(4);
    assert_eq!(world.choices_without("x:1", &[3]), [2]);
    // A server without a zone has no preference.
    let world = World::with("default", "a zone=west, b");
    assert_eq!(world.choices("x:1"), [1, 2]);
}
