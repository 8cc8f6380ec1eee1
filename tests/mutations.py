"""The mutants of `mutants.py`: small faults, each a change of behaviour that matters.

A file of the package, and its faults: what is wrong, the tests that are to notice it ("kaisa::x" is
test_x of test_kaisa.py), and a text that occurs exactly once in that file with what it becomes.
Texts are as short as that allows, so that they stay put when lines around them change, and tests
are few and quick. Several lines, or such as begin with spaces, are written as a diff writes them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault; `old` becomes `new` in a file of the package, and `tests` are to notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(table: str) -> list[Mutant]:
    """The mutants of a table like the one below."""
    found: list[Mutant] = []
    file = ""
    name = ""
    tests = ""
    texts: dict[str, list[str]] = {"-": [], "+": []}

    def over() -> None:
        if name:
            old, new = ("\n".join(texts[sign]) for sign in "-+")
            found.append(Mutant(name, file, old, new, tuple(tests.split())))

    for line in filter(None, table.splitlines()):
        if line.startswith("    ") and "  =>  " in line:
            texts["-"][:], texts["+"][:] = ([x] for x in line[4:].split("  =>  "))
        elif line.startswith(("  -", "  +")):
            texts[line[2]].append(line[4:])
        elif line.startswith("  <-  "):
            tests += " " + line[6:]
        else:
            over()
            file, name = (line[3:], "") if line.startswith("== ") else (file, line)
            name, _, tests = name.partition("  <-  ")
            texts = {"-": [], "+": []}
    over()
    return found


MUTANTS = read(r"""
== training/throttle.py
a throttle that each rank has for itself  <-  throttle::all_ranks_take_the_largest_interval
    if world.size > 1:  =>  if False:
a throttle by the largest duration  <-  throttle::outliers_do_not_count
    R = statistics.median(durations)  =>  R = max(durations)
a throttle of shorter intervals  <-  throttle::refreshes_stay_within_the_overhead
    return math.ceil(R / (overhead * T))  =>  return math.floor(R / (overhead * T))
a throttle that no checkpoint keeps  <-  throttle::a_checkpoint_contains_the_interval
    self.interval = part.whole(interval_entry, 0)  =>  pass

== optimizers/arguments.py
a GradScaler that parts the ranks
  <-  options::grad_scaler_raises_if_the_optimizer_averages_gradients
    and not is_synchronized  =>  and False
parameters on meta taken in  <-  groups::parameters_on_the_meta_device_raise_until_they_are_materialized
  -     check_not_on_meta(name, params, found.module)
  -
trained parameters that were frozen do not warn
  <-  frozen_parameters::one_warning_names_the_parameters_that_would_not_train
    and p.requires_grad and p.grad is not None:  =>  and False:

== optimizers/checkpoint.py
groups in another order load
  <-  checkpoint_checks::groups_in_another_order_raise_unless_a_hook_reorders_them
    if saved_names == names or sorted(saved_names) != sorted(names):  =>  if True:
collected factors are not in the state  <-  factor_exchange::the_rank_that_saves_has_all_factors
  - CURVATURE: {**entry.get(CURVATURE, {}), **added[p].get(CURVATURE, {})}
  + CURVATURE: {**entry.get(CURVATURE, {})}
two bases: other weights went to each
  <-  aux_base_state::a_checkpoint_of_other_bases_raises_before_anything_changes
    if saved_value is not None and saved_value != value:  =>  if False:
two bases: both are exported
  <-  aux_base_state::plain_optimizers_load_and_return_their_parts
    if has_two_bases and group[AUX_BASE] is not aux_base:  =>  if False:

== optimizers/consistency.py
settings are not compared  <-  agreement::a_rank_out_of_sync_raises_on_all_ranks
    *_group_settings(groups)]  =>  ]
descriptions compared by their length  <-  collectives::every_rank_reports_the_first_difference
    repr(facts).encode()  =>  repr(len(facts)).encode()
checksums without places  <-  debug::the_checksum_depends_on_positions
    (multipliers[: len(block)] * block).sum()  =>  block.sum(dtype=torch.int64)

== training/helpers.py
a DDP over helpers goes unnoticed
  <-  sharding::ddp_over_helper_ranks_raises_at_the_first_training_pass
  - if mixed_in and set(ranks).intersection(workers):
  + if mixed_in and not set(ranks).intersection(workers):

== training/curvature.py
gradients summed, not averaged  <-  kaisa::micro_batches_on_many_processes_equal_one_batch
    torch._foreach_div_(gradients, float(world.size))  =>  pass
a gradient that is None everywhere becomes zeros
  <-  placements_gradients::a_gradient_that_is_none_on_all_ranks_stays_none
    if p.grad is None and count > 0:  =>  if p.grad is None:

== training/groups.py
names of a group that is added are left out
  <-  groups::an_added_group_has_names_if_the_others_do
    if is_named or not any(NAMES in other for other in others):  =>  if True:
the schedule's largest learning rate is not looked up
  <-  invariants_steps::a_constant_clip_follows_the_square_of_the_learning_rate
  <-  dho2::the_newton_step_follows_the_learning_rate_unless_it_is_a_schedule
    RATES = ("lr", "initial_lr", "max_lr")  =>  RATES = ("lr",)

== training/context.py
hooks that stay when their optimizer goes
  <-  sharding::hooks_are_removed_with_an_unreferenced_optimizer
    weakref.finalize(self, remove_handles, handles).atexit = False  =>  pass
sharded gradients averaged twice  <-  fsdp::layers_that_fsdp_ignores_are_averaged_and_preconditioned
    self.trainable_params() if not is_dtensor(p)]  =>  self.trainable_params()]
warnings again and again
  <-  contract_steps::a_layer_without_statistics_is_named_in_one_warning
    new = key not in self.warned  =>  new = True

== optimizers/base_pair.py
two bases: the head is hidden  <-  aux_base::hidden_weights_use_the_base_and_others_use_aux_base
    module is head  =>  False
two bases: Muon is given more than matrices  <-  aux_base::hidden_weights_use_the_base_and_others_use_aux_base
    p.ndim == 2 if self._only_matrices else p.ndim >= 2  =>  p.ndim >= 2
two bases: marks are taken as they come
  <-  aux_base::an_invalid_group_changes_nothing
  - self._check_marked_group(group)
  -             return [group]
  + return [group]
two bases: one steps all groups
  <-  aux_base::without_curvature_two_bases_equal_two_separate_optimizers
    [g for g in self.param_groups if g[AUX_BASE] is is_aux]  =>  list(self.param_groups)
two bases: the wrong one steps  <-  aux_base_state::a_resumed_run_is_equal_bit_for_bit
    return aux_part if group[AUX_BASE] else base_part  =>  return base_part
two bases: a loaded state is nobody's
  <-  aux_base_state::a_base_can_convert_its_loaded_state
    if len(part.state):  =>  if False:

== distributed/assignment.py
cost of computation as that of memory  <-  assignment::costs_follow_from_the_dimensions
    power = 3  =>  pass
smallest layers placed first  <-  assignment::computation_and_memory_are_balanced_differently
    key=lambda i: (-(a_costs[i] + g_costs[i]), i)  =>  key=lambda i: (a_costs[i] + g_costs[i], i)
owners balanced by number instead of cost
  <-  assignment::work_is_assigned_longest_processing_time_first
    ranks[i] = _add_to_smallest(loads, costs[i])  =>  ranks[i] = _add_to_smallest(loads, 1.0)
the least load of the wrong rank  <-  assignment::the_assignment_equals_its_definition
    (load + cost, rank))  =>  (load + cost, -rank))

== distributed/helper_link.py
a shutdown without the messages before it
  <-  helper_link::no_message_follows_a_shutdown
    while item is not None:  =>  while False:
a helper that keeps a model of its own
  <-  mrdho2_accelerator::accelerators_receive_the_workers_whole_model
    unflatten_into(flat, same_dtype)  =>  pass
a stop of all processes is a silence  <-  helper_link::suspending_all_processes_loses_no_peer
    min(now - self._checked_at, self._limit / 4)  =>  now - self._checked_at
a store listens everywhere  <-  helper_link::a_store_listens_on_loopback_unless_machines_differ
    place = "127.0.0.1"  =>  place = "0.0.0.0"

== distributed/roles.py
one process alone has helpers  <-  roles::the_last_ranks_are_helpers_and_at_least_one_trains
    count = helpers if world_size > 1 else 0  =>  count = helpers

== distributed/fsdp.py
rows of a replica sent by another  <-  fsdp::fsdp_trajectories_equal_those_of_one_process
    replica_of[rank] = replica  =>  replica_of[rank] = replica[::-1]

== distributed/world.py
a group of its own for each optimizer  <-  robustness::several_optimizers_share_process_groups
    if key not in groups:  =>  if True:
only the first bucket of a sum arrives  <-  collectives::sums_support_any_shape_and_dtype
    while self.collectives:  =>  if self.collectives:
buckets without a bound  <-  collectives::sums_support_any_shape_and_dtype
    if key not in open_buckets or filled[key] + size > max_bytes:  =>  if key not in open_buckets:
bfloat16 sent as it is  <-  collectives::gloo_sends_half_precision
    in (torch.bfloat16, torch.float16)  =>  in (torch.float16,)
bfloat16 sums added in bfloat16  <-  collectives::low_precision_sums_accumulate_in_float32_in_rank_order
    addends[0].to(accumulation_dtype(addends.dtype))  =>  addends[0].clone()
a group's first rank taken for the world's
  <-  collectives::broadcast_copies_the_first_rank collectives::a_group_numbers_its_own_ranks
  - dist.broadcast(flat, group=self.group, group_src=0)
  + dist.broadcast(flat, 0, group=self.group)
copies by a sum that lose the sign of a zero  <-  collectives::uneven_messages_are_all_reduced
    staged.new_full((total,), -0.0)  =>  staged.new_full((total,), 0.0)
narrow sums of many ranks that add up narrow  <-  collectives::uneven_messages_are_all_reduced
    whole = staged.to(accumulation_dtype(staged.dtype))  =>  whole = staged
the rows of all ranks for one owner  <-  collectives::sums_reach_only_their_owners
    return self.size * max(sizes) > 2 * total  =>  return False
half of the ranks need not agree  <-  collectives::ranks_agree_only_if_all_agree
    return not bool(noes)  =>  return bool(noes < 2.0)
what is missing at its source arrives as ones  <-  collectives::parts_arrive_in_their_shapes
    torch.zeros(shape, dtype=dtype, device=device) for shape  =>  torch.ones(shape, dtype=dtype, device=device) for shape
words that are never compared  <-  agreement::ranks_detect_different_fingerprints
    return int(both[0]) == ~int(both[1])  =>  return True

== export/kronfluence.py
sums for documents, written as means
  <-  export::files_for_influence_functions_record_the_kind_of_factors
    = layer.corrected * terms  =>  = layer.corrected

== export/layers.py
a bias's column handed to GPTQ  <-  export::the_gptq_hessian_omits_the_bias
    if columns == shape.in_dim:  =>  if True:
each rank writes
  <-  export::many_processes_write_the_files_of_one
    return next(iter(curvature), None) in curvature.local_layers  =>  return True

== checkpoint/files.py
files renamed before they are on the disk  <-  files::a_file_is_there_as_a_whole_or_not_at_all
  -             os.fsync(file.fileno())
  -

== fosi/accelerator.py
maximize is forgotten where updates are judged  <-  mrdho2::maximizing_the_negative_loss_equals_minimizing_the_loss
    losses.append(flat_params.sign * loss)  =>  losses.append(loss)
vectors that are not finite are sent  <-  mrdho2_use::non_finite_eigenpairs_are_not_sent
    finite=not pairs.trouble  =>  finite=True

== fosi/state.py
room for eigenpairs taken for eigenpairs
  <-  dho2_state::a_dcp_resumed_run_is_equal_bit_for_bit
    if part is None or part["num_largest"] < 0:  =>  if part is None:

== fosi/update.py
eigenvectors that need not be finite
  <-  dho2_faults::non_finite_eigenvectors_do_not_reach_the_parameters_of_one_process
    if not math.isfinite(float(total)):  =>  if False:
groups' own learning rates in the final update
  <-  mrdho2_use::each_group_has_its_own_newton_scale_in_a_final_update
    alpha * (as_scalar(group["lr"])  =>  alpha * (as_scalar(training.groups[0]["lr"])
a Newton step that does not follow the schedule
  <-  dho2::the_newton_step_follows_the_learning_rate_unless_it_is_a_schedule
    alpha = alpha * (as_scalar(group["lr"]) / larger(peak, 1e-30))  =>  pass
uphill is downhill  <-  dho2_state::maximizing_the_negative_loss_equals_minimizing_the_loss
    alpha = -alpha  =>  pass
the base moves inside the subspace  <-  dho2::the_base_does_not_move_inside_the_subspace
    -alpha * newton - s * inside  =>  -alpha * newton
one element that is not finite reaches all parameters
  <-  trust_region::one_non_finite_element_does_not_reach_the_others
    inside = torch.nan_to_num(inside, nan=0.0, posinf=0.0, neginf=0.0)  =>  pass
parameters without a gradient move
  <-  dho2_state::a_parameter_without_a_gradient_does_not_move
    [None if p.grad is None else p for p in params]  =>  params
a vector is cut anew by the next step alone  <-  mrdho2_fsdp::a_checkpoint_resumes_on_other_ranks
  - self.replan()
  -         self.adopt_params()
  + self.replan()
the guard does not know a negative loss  <-  dho2::a_worse_final_update_is_rejected
  - rise > TOLERATED_RISE * abs(self._batch_loss)
  + loss > (1.0 + TOLERATED_RISE) * self._batch_loss
a start without new directions
  <-  dho2_corner_cases::a_warm_start_finds_curvature_outside_of_the_last_subspace
    last_sum.add_(start, alpha=RANDOM_SHARE)  =>  last_sum
the bound of s is not loaded  <-  dho2_state::a_resumed_run_is_equal_bit_for_bit
    self._scale_bound = counts.get("base_scale_bound", 1.0)  =>  pass
carried momentum is not loaded  <-  dho2_state::a_resumed_run_is_equal_bit_for_bit
    local_rows(pairs.outside_momentum  =>  local_rows(0 * pairs.outside_momentum
the last Newton step is not loaded  <-  trust_region::a_run_resumed_while_the_trust_region_binds_is_equal_bit_for_bit
    full_step=pairs.last_step  =>  full_step=self.subspace.newton.full_step
endless steps where the curvature has vanished
  <-  found::curvature_that_vanishes_makes_no_endless_steps
    bool(largest < VANISHED * last_largest)  =>  False

== fosi/epochs.py
gradients go to the sum of another point
  <-  mrdho2_use::a_checkpoint_during_an_epoch_restores_its_start
  - self.sums = None
  -         super().load(saved)
  + super().load(saved)
an update where the loss falls at all  <-  mrdho2::a_final_update_must_reach_half_of_the_predicted_decrease
    after <= before - MIN_LOSS_FALL * abs(before)  =>  after <= before
a final update without the way back to c  <-  mrdho2::equation_17_on_a_quadratic_equals_its_closed_form
    before - self.sums.start,  =>  0 * before,
eigenvectors of the accelerators in another order
  <-  mrdho2::equation_17_on_a_quadratic_equals_its_closed_form
  -         for message in messages:
  -             vectors
  +         for message in messages[::-1]:
  +             vectors
no warm-up with accelerators  <-  mrdho2::the_base_steps_alone_during_warm_up
    if not self.links or self._is_warming_up:  =>  if not self.links:

== fosi/flat_params.py
packed parameters that are not written back  <-  dho2::steps_equal_dense_algebra
  - views = self._allocated_buffer().views
  -         for piece, view, tensor in zip(self.local_pieces, views, tensors, strict=True):
  + for piece, view, tensor in ():
parts of gradients that are not contiguous
  <-  dho2_processes::memory_formats_change_nothing_on_many_processes
    p.grad = gradient.contiguous()  =>  pass

== fosi/subspace.py
the share of the gradient counted on every process
  <-  dho2_processes::learning_rate_schedules_reach_the_base_in_every_layout
    sums[complete] /= self.world.size  =>  pass
near-zero eigenvalues give endless steps  <-  dho2::steps_equal_dense_algebra
    torch.maximum(magnitudes, floor * largest)  =>  magnitudes
Newton steps up negative curvature  <-  dho2::one_newton_step_finds_the_minimum_and_leaves_saddles
    magnitudes = values.abs()  =>  magnitudes = values
all groups step by the Newton scale of the first
  <-  mrdho2_use::each_group_has_its_own_newton_scale_in_a_final_update
    spans = self.group_spans  =>  pass
Newton steps are never cut  <-  trust_region::steps_converge_for_any_curvature
    select(ratio > NEAR_LIMIT, cut, grown)  =>  grown
a Newton step of any length  <-  trust_region::a_step_is_at_most_ten_times_the_usual_length
    select(has_typical, RADIUS * state.typical_decrease, math.inf)  =>  math.inf
a step said to be taken back is not
  <-  trust_region::a_step_to_a_non_finite_gradient_is_rejected
    reverted = NewtonStep(way_back,  =>  reverted = NewtonStep(zeros,
what cannot be compiled is an error
  <-  trust_region::the_rule_is_compiled_on_devices_with_an_eager_fallback
    except Exception:  =>  except ImportError:

== kfac/state.py
a lost factor arrives as zeros
  <-  factor_exchange::a_lost_factor_is_also_missing_from_the_next_checkpoint
    and not has and bool(present):  =>  and not has:
averages that another rank owns are sent on
  <-  factor_exchange::a_lost_factor_is_also_missing_from_the_next_checkpoint
    value = saved.get(entry.name) if has else None  =>  value = saved.get(entry.name)
inverses of another scale than the run's  <-  resume::inverses_of_another_scale_are_refreshed
    if empty or scaled != inverses.scaled:  =>  if empty:
a resumed run without the solves under way  <-  resume::a_resumed_run_equals_the_run
    loaded.pending[block] = PendingInverse(  =>  PendingInverse(
a chosen fraction that checkpoints forget
  <-  planning_fraction::a_checkpoint_remembers_the_choice_for_as_many_ranks
  - entries |= zip(CHOSEN_WORKERS, (self.num_workers, world_size), strict=True)
  + pass

== kfac/curvature.py
factors forget by the update, not by the step
  <-  distkfac::without_a_decay_all_statistics_have_equal_weight
    age = step - self._averaged_at  =>  age = 1
messages forget since the beginning of a resumed run
  <-  stats_workers::the_first_message_decays_factors_since_the_last_update
    self._averaged_at = numbers.averaged_at  =>  pass
statistics that leave in the passes as sums
  <-  loss_reduction::unequal_micro_batches_work_with_every_factor_exchange
    if layers.losses.current() != "step_mean":  =>  if True:
an instrument without the owners' clip
  <-  metrics::the_reported_clip_is_the_one_that_was_applied
    self._clip_factor = result.clip_factor  =>  self._clip_factor = None
a frozen layer keeps its inverse  <-  kaisa::a_frozen_layer_stores_no_inverse
    block.drop_inverse()  =>  pass
ranks' losses not compared  <-  loss_reduction::ranks_with_different_reductions_raise
  - ("loss reduction", self.layers.losses.compared),
messages forget since the beginning
  <-  stats_workers::factors_decay_between_messages_as_in_as_many_steps
  - self.layers.update_averages(sums, decay)
  -         self._averaged_at = self.training.steps
  + self.layers.update_averages(sums, decay)

== kfac/checkpoints.py
statistics from before a load  <-  contract_state::statistics_captured_before_a_load_are_dropped
    block.staged.clear()  =>  pass
a factor that a checkpoint lacks is not lost
  <-  factor_exchange::a_layer_with_a_lost_factor_starts_its_averages_again
    lost = list(itertools.compress(blocks, factor_flags))  =>  lost = []
a resumed run that forgets its intervals  <-  drift::a_resumed_run_has_the_same_intervals
    self._drift.load(saved, blocks)  =>  pass
inverses that one rank lacks  <-  resume::inverses_that_no_rank_has_are_refreshed
    all_reduce_max([flags]).wait()  =>  all_reduce_max([])

== kfac/feedback.py
a floor by the arithmetic mean  <-  step_scale::the_damping_floor_uses_all_layers
  - mean_curvature = (total.sum_of_roots / total.num_curvatures) ** 2
  + mean_curvature = total.sum_of_roots / total.num_curvatures
each rank's own cosines  <-  drift::cosines_equal_those_of_dense_preconditioning
    if is_reported else 0.0  =>  if True else 0.0

== kfac/step_scale.py
steps that maximize judged as those that minimize
  <-  step_scale::maximizing_the_negative_loss_equals_minimizing_the_loss
    negative_step[p] = -negative_step[p]  =>  pass
steps over adaptive bases that are earned under a schedule
  <-  step_scale::over_adaptive_bases_the_scale_is_two_while_the_rate_changes
    low = bounds.low_scheduled  =>  low = bounds.low
steps that are scaled by the base's side
  <-  step_scale::only_preconditioned_weights_are_scaled
  <-  step_scale::the_slope_is_the_next_mean_gradient_along_the_scaled_step
  - torch._foreach_lerp_(weights, before, 1.0 - scale)
  + torch._foreach_lerp_(weights, before, scale)

== kfac/layers.py
a layer that passed stays unverified  <-  verification::a_layer_that_passed_can_have_another_reason_later
    self._unverified.discard(block.name)  =>  pass
dropped statistics without a warning
  <-  failures::running_averages_stay_finite_whatever_the_size_of_gradients
    if num_dropped and training.is_first_warning(key):  =>  if False:
layers whose weight and bias differ
  <-  group_options::a_layer_in_two_groups_raises_with_its_name
    any(value != values[0] for value in values)  =>  False
groups that are preconditioned all the same
  <-  group_options::precondition_false_equals_skip_layers
    group.get("precondition") is False  =>  group.get("precondition") is None

== kfac/layers.py
a group's factor_decay that does nothing
  <-  group_options::a_groups_factor_decay_applies_to_its_layers
    value = own_decays.get(block, decay)  =>  value = decay
zero_grad keeps statistics  <-  contract_steps::a_step_after_zero_grad_alone_adds_no_statistics
  - block.staged.clear()
  -         self.collector.step_passes.passes.clear()
  + self.collector.step_passes.passes.clear()
a state of averages that are slices by now
  <-  queued_statistics::the_state_refers_to_the_stacks
    if has_new_stack:  =>  if False:
passes of a layer for those of a step
  <-  example_counts::a_layer_that_some_micro_batches_skip_is_counted
    passes = max(passes, block.staged.micro_batches)  =>  passes = block.staged.micro_batches
G of a step's losses without their number
  <-  loss_reduction::unequal_micro_batches_train_like_the_whole_batch
    shapes, share)  =>  shapes, 1.0)
statistics of micro-batches with the square of their number
  <-  stats_workers::a_stats_worker_counts_micro_batches
    collect_sums(staged, micro_batches, terms)  =>  collect_sums(staged, 1, terms)

terms of the last layer that a rank owns
  <-  loss_terms::every_rank_knows_the_terms_of_the_last_layer
    hooked.append(rows_only)  =>  pass

== kfac/metrics.py
a curvature object with an absolute damping
  <-  model_curvature::solve_with_the_damping_of_training_equals_the_optimizers_step
    if options.relative_damping:  =>  if False:

== kfac/spd_kfac.py
statistics that wait for the step
  <-  pipelined::pipelining_does_not_change_the_trajectory[plain]
    if not self._expected or pairs is None:  =>  if True:
statistics that have changed since they were sent
  <-  pipelined::pipelining_does_not_change_the_trajectory[accumulated]
  <-  pipelined::pipelining_does_not_change_the_trajectory[thrown_away]
    [float(a != b) for a, b in zip(sent, now, strict=True)]  =>  [0.0] * len(now)

== kfac/plan.py
DistKFAC's owners by number  <-  distkfac_ranks::inverse_ranks_are_balanced_by_cost
  - balance_costs([layer.cost for layer in layers], ranks)
  + balance_costs([1.0 for layer in layers], ranks)
gradients from the wrong row  <-  kaisa::layers_may_have_different_dtypes
    return self.workers[0] // len(self.workers)  =>  return 0
owners' gradients balanced by number
  <-  dpkfac::parameters_without_a_layer_go_to_the_rank_that_sends_least
    load[owner] += sizes[i]  =>  load[owner] += 1
heads are not summed
  <-  distkfac_ranks::every_worker_has_the_weights_and_traces_of_all_layers
  <-  factor_exchange::ranks_are_weighted_by_their_examples
    heads.append(layer_sums.head)  =>  heads.append(layer_sums.head.clone())
A kept by the solver of G, and G by that of A
  <-  factor_exchange::each_factor_is_on_one_rank_and_its_trace_on_all_ranks
  - None if self.factors_everywhere else self.inverse_rank(factor)
  + self.inverse_ranks[factor == "A"]
an owner's layers have statistics of all batches
  <-  dpkfac::a_layers_factors_come_from_its_owners_batches
    batch_rank=owner,  =>  batch_rank=None,
every gradient worker keeps an inverse of a sharded layer
  <-  fsdp::ranks_store_their_rows_and_their_layers_factors
    workers = range(rank, rank + 1)  =>  workers = layer_plan.workers

== kfac/precondition.py
a clip of a rank's own layers alone
  <-  dpkfac::one_coefficient_clips_the_layers_of_all_owners
    world.all_reduce([change]).wait()  =>  pass
outliers that count in full  <-  change_clip::the_bound_is_four_times_the_running_average
    addcmul_(change, ratio, value  =>  addcmul_(change, torch.ones_like(ratio), value
a change that rounding makes negative is clipped
  <-  change_clip::the_bound_is_four_times_the_running_average
    change.clamp_min(tiny)  =>  (change + tiny)
steps without a preconditioned layer that count
  <-  change_clip::steps_without_preconditioned_layers_do_not_enter_the_average
    if clip is not None and solved:  =>  if clip is not None:
a resumed run with another usual change  <-  resume::a_resumed_run_equals_the_run
    self.steps = int(part.number(steps_name))  =>  pass
a clip in lr, not lr²  <-  invariants_steps::19_the_clip_uses_each_groups_learning_rate
    products.new_ones(()) * rate**2  =>  products.new_ones(()) * rate
a clip that stretches  <-  invariants_steps::19_the_clip_bounds_the_whole_step
    torch.sqrt(kl_clip / change).clamp(max=1.0)  =>  torch.sqrt(kl_clip / change)

== kfac/schedule.py
layers without an inverse that are tried at every tick
  <-  drift::a_layer_without_an_inverse_is_tried_at_doubling_intervals
    return state.interval_without_inverse  =>  return 1
frozen layers in the reported intervals
  <-  drift::reported_intervals_are_those_of_layers_with_an_inverse
    for block in solved or self.states  =>  for block in self.states
factors that count updates  <-  defaults::the_memory_of_factors_in_steps_does_not_depend_on_the_interval
    per_step ** max(age, 1)  =>  per_step
a young training remembers as much as an old one
  <-  defaults::early_in_a_run_factors_remember_a_share_of_its_steps
    per_step = min(per_step, 1 - 1 / remembered)  =>  pass
newcomers wait for the interval  <-  robustness::a_newly_trainable_layer_is_refreshed_when_it_has_statistics
  - if step == self._layers.newly_trainable_at:
  -             return layers
  + if False:
  +             return layers
intervals that never fall  <-  drift::intervals_grow_without_drift_and_shrink_with_drift
    if cosine < thresholds.halve_below:  =>  if False:
intervals that grow after one refresh alike  <-  drift::drift_equals_a_computation_by_hand
    elif num_stable >= thresholds.patience:  =>  elif num_stable >= 1:
refreshes as often as the first layer wants
  <-  drift::layers_are_due_at_multiples_and_not_more_often_than_a_quarter_needs
    of_solved[int(len(of_solved) * TICK_QUANTILE)]  =>  of_solved[0]

== kfac/sharded_gradients.py
the clip of a bucket's own layers  <-  fsdp::a_bucket_takes_one_all_to_all_each_way
    changes.append(clip.change(preconditioned))  =>  changes = [clip.change(preconditioned)]

== kfac/inversion.py
a layer of another rank that cannot be damped hangs the others
  <-  failures::all_ranks_keep_all_inverses_if_one_rank_cannot_damp
    self.step_plan.to_invert.get(block, ())  =>  self.step_plan.to_invert[block]
the damping of the landing  <-  distkfac::an_inverse_uses_the_damping_of_its_snapshot
    dampings.append(layer_damping.damping)  =>  dampings.append(self.damping_option)
layers that are due when they land wait for the next interval
  <-  distkfac::a_layer_that_became_due_while_pending_is_submitted_again
    self._submit(resubmitted, mean_curvature)  =>  pass
a resumed run that refreshes all layers  <-  resume::a_resumed_run_equals_the_run
    in loaded.inverses.items():  =>  in ():
layers under way are launched again  <-  distkfac::an_inverse_is_never_older_than_max_staleness
    if block not in self.pending:  =>  if True:
decompositions that their solver has not rounded
  <-  exchange_dtype::all_ranks_have_equal_parameters
  -                         own[factor_name], plan.exchange_dtype
  +                         own[factor_name], None
a failed G is not told  <-  failures::a_failed_factor_is_reported
    return Outcome.FAILED  =>  return Outcome.NO_STATISTICS
verdicts are added up  <-  failures::a_failed_factor_is_reported
    all_reduce_max(messages)  =>  all_reduce(messages)
a dead layer is called unused where it is called
  <-  kaisa::a_layer_that_is_never_called_is_reported_as_unused
    no_statistics=block.status is LayerStatus.NOT_CAPTURED  =>  no_statistics=True
one refresh too many before an error
  <-  failures::too_many_consecutive_failures_raise_on_every_rank
    block.failures >= limit  =>  block.failures > limit
relative damping without the mean curvature
  <-  invariants_steps::relative_damping_is_a_share_of_a_layers_mean_curvature
    damping = damping_option * positive  =>  damping = damping_option * torch.ones_like(positive)
a gradient's scale without the damping
  <-  defaults::grafting_multiplies_newton_steps_by_the_mean_damped_curvature
    mean_eigenvalues = (curvature + damping)  =>  mean_eigenvalues = (curvature + 0 * damping)
damping for scale, from another process
  <-  distkfac_ranks::parameters_are_equal_on_all_ranks_for_any_thread_schedule
    [layer_damping.damping, layer_damping.mean_eigenvalue]  =>  [layer_damping.damping] * 2
stale inverses after a change of layers
  <-  kaisa::a_layer_without_an_inverse_gets_one_at_the_next_step
    if self.requested:  =>  if False:
an unexplained layer not told of to the other ranks
  <-  verification::a_layer_that_one_rank_cannot_verify_falls_back_on_all_ranks
    if block.unverified:  =>  if False:
decompositions of threads arrive with another damping
  <-  distkfac_ranks::without_staleness_distkfac_equals_kaisa
    torch.as_tensor(n, dtype=dtype, device=device)  =>  torch.ones((), dtype=dtype)
an instrument without the failures  <-  metrics::failures_are_counted
  -             self.num_failures += 1
  -
damping without a floor  <-  step_scale::the_damping_floor_uses_all_layers
    self._damping_floor * pending[blocks[0]].mean_curvature  =>  0.0
a step staler than allowed  <-  distkfac::with_deterministic_staleness_steps_use_inverses_of_that_age
    staleness is not None and age >= staleness  =>  staleness is not None and age > staleness
a solve on a thread that is older than drift allows
  <-  drift::a_step_waits_for_threads_before_the_next_refresh
    if self._drift is not None and age >= self._drift.interval(block) - 1:  =>  if False:
of a thread's decompositions one is enough  <-  distkfac::a_failed_factor_on_a_thread_is_reported
    len(result.decompositions) < num_expected  =>  not result.decompositions

== kfac/inverter.py
a dead layer solved with the others
  <-  refresh_on_device::a_refresh_gives_equal_results_on_a_device
    if not weight > 0:  =>  if False:

== kfac/async_inversion.py
a dropped result is that of a later refresh
  <-  distkfac::a_dropped_thread_result_is_not_used_by_a_later_refresh
    self._futures.pop(block, None)  =>  pass
deterministic without effect  <-  distkfac::deterministic_inverses_work_next_to_a_layer_without_statistics
    elif self.deterministic or not future.done():  =>  elif not future.done():
a snapshot that changes  <-  distkfac::with_deterministic_staleness_steps_use_inverses_of_that_age
    [torch.empty_like(factor) for factor in factors]  =>  factors
a solve with all cores  <-  worker_threads::threads_use_one_core_and_leave_the_main_thread_its_cores
    torch.set_num_threads(1)  =>  pass

== kfac/stats_workers.py
a stats worker's losses of a step as sums
  <-  stats_workers::a_stats_worker_counts_micro_batches
    sums = self.layers.undo_step_mean(sums, share=1.0)  =>  pass
a stats worker's gradients pile up  <-  stats_workers::a_stats_workers_gradients_do_not_accumulate
    nn.Module.zero_grad(self.training.model)  =>  pass
statistics to the first worker, whoever owns the layer
  <-  distkfac_ranks::stats_workers_compute_statistics_of_their_batches_at_the_received_weights
    owned[layer.inverse_rank("A")].append(block)  =>  owned[0].append(block)
messages of other layers count  <-  stats_workers::after_a_change_workers_capture_until_newer_messages_arrive
    if message.note["plan_version"] < self.plan_version:  =>  if False:
snapshots queue up  <-  stats_workers::no_snapshot_is_sent_while_statistics_are_in_transit
    if num_sent > self._num_answered.get(link, 0):  =>  if False:
a stats worker may be sharded  <-  fsdp_stats::fsdp_with_stats_workers_is_refused
    raise ValueError(sharding_error(self.training.name, "stats"))  =>  return
a stats worker that does not follow the workers' steps
  <-  stats_workers::a_stats_worker_verifies_layers_at_the_milestones_of_the_workers
    self.training.resume_at(note["step"])  =>  pass
unverified layers are not named
  <-  stats_workers::a_layer_that_a_stats_worker_cannot_verify_falls_back_until_it_passes
    unverified=unverified,  =>  unverified={},
layers that stats workers never verify again
  <-  stats_workers::a_layer_that_a_stats_worker_cannot_verify_falls_back_until_it_passes
    elif block.unverified and not self.own_passes:  =>  elif False:
statistics are not requested  <-  stats_workers::workers_capture_again_when_no_valid_statistics_arrive
    bool(unpacked) and not any(unpacked.values())  =>  False

== kfac/thor.py
traces without the damping  <-  trace_refresh::layers_whose_trace_changed_are_refreshed
  - relative_change(trace, prev_trace)
  + relative_change(trace - option, prev_trace - prev_option)
a schedule of the damping that wakes no layer
  <-  trace_refresh::a_damping_schedule_triggers_a_refresh
    max(trace_change, relative_change(option, prev_option))  =>  trace_change

== kronecker/autograd.py
values taken for queries  <-  attention::factors_equal_those_of_separate_linears
    (0, 1, 2)[piece : piece + count]  =>  (0, 1, 2)[:count]
an attention in a group of its own without statistics
  <-  attention::an_attention_that_fully_shard_shards_by_itself_has_the_same_factors
    if fsdp is not None:  =>  if False:

== kronecker/block.py
a bias's gradient in the wrong column  <-  invariants_steps::15_a_step_equals_the_dense_solve
    torch.cat(views, layout.axis)  =>  torch.cat(views[::-1], layout.axis)
inverses of some layers of a batch are others'
  <-  layer_batches::a_layer_batch_equals_its_layers_one_by_one
    join_groups(column)  =>  join_groups(column[:1] * len(column))

== kronecker/block.py
a slice that keeps its stack  <-  queued_statistics::the_state_refers_to_the_stacks
    self.factors.entries[name] = factor.clone()  =>  pass
gradients set to None by the model kept as statistics
  <-  example_counts::a_discriminator_counts_its_own_passes
    return not self.staged.empty and not self.has_gradient  =>  return False
a Linear with an activation behind it taken for one
  <-  verification::a_subclass_that_computes_something_else_falls_back
    if residual > TOLERANCE:  =>  if False:
loaded factors weigh nothing  <-  contract_state::a_dcp_round_trip_continues_the_trajectory
    entry.copy_(saved[name])  =>  entry.fill_(1.0)
a frozen layer's factors of another size are loaded
  <-  checkpoint_checks::factors_of_a_frozen_layer_with_another_size_are_not_loaded
    and saved[name].shape == entry.shape:  =>  and True:

== kronecker/capture.py
forwards that checkpoints repeat are new ones
  <-  example_counts::two_losses_of_one_forward_pass_are_not_micro_batches
    self._again = autograd.has_earlier_pass(self._outer_pass)  =>  pass
derivatives outside of the loss warn
  <-  derivatives::derivatives_outside_of_the_loss_do_not_warn
  -         if not self._counts(module):
  -             return
  +         if False:
  +             return
gradients beside the loss as examples  <-  example_counts::gradients_of_other_quantities_add_no_examples
  -         if not self._counts(module):
  -             # With sampled labels this may be their own pass, which accumulates nowhere.
  +         if False:
  +             # With sampled labels this may be their own pass, which accumulates nowhere.
the view of a layer's output hooked, which an operation in place replaces
  <-  verification::in_place_operations_lose_no_pairs
    if edge.node.name() != "ViewBackward0":  =>  if True:
gradients beside the loss as examples, in a graph
  <-  compiled::evaluation_input_gradients_and_frozen_layers_give_no_pairs
  -         if not self._counts(module):
  -             self.missed[module] = NOT_ACCUMULATED
  +         if False:
  +             self.missed[module] = NOT_ACCUMULATED
steps without statistics have the operators in their graph
  <-  compiled::a_disabled_capture_adds_nothing_to_the_graph
    if is_exporting() or not self.gate.open:  =>  if is_exporting():
a graph's pairs of the data's labels beside those of drawn ones
  <-  compiled_sampled::unsupported_models_raise_when_compiled
  -             _refuse_compiled_part()
  +             pass
exports with hooks  <-  compiled::exported_and_traced_models_contain_no_hooks
    if is_exporting() or not self.gate.open:  =>  if not self.gate.open:

== kronecker/convolutions.py
a convolution's G without the number of locations
  <-  invariants_factors::6_every_convolution_has_the_factors_of_its_patches
    .div_(outputs.shape[-dims:].numel())  =>  .div_(1)
padding 'same' the other way round
  <-  invariants_factors::6_weight_times_patches_is_the_convolution
    (total // 2, total - total // 2)  =>  (total - total // 2, total // 2)
one end of the window counts twice  <-  autocorrelation::autocorrelations_equal_patches
    left = torch.cat([-first, last])  =>  left = torch.cat([first, last])

== kronecker/solvers.py
eigenvectors of factors that are not scaled  <-  solvers::the_first_attempt_works_at_any_scale
    scaled = matrix / size  =>  scaled = matrix / torch.ones_like(size)
large finite factors are given up
  <-  solvers::any_finite_factor_can_be_decomposed
    not bool(stored.isfinite().all())  =>  not bool(_norm(stored).isfinite().all())
a retry without the damping that float32 rounds away
  <-  solvers_failures::a_retry_adds_the_damping_in_float64
    _build_matrices([moved], torch.float64)  =>  _build_matrices([moved], problem.dtype).double()
eigenvectors need not be orthogonal  <-  solvers::a_failed_factor_does_not_affect_its_batch
    errors.amax(-1)  =>  errors[:, 0]
negative eigenvalues  <-  solvers::negative_eigenvalues_are_clamped
    values.clamp_min(0) * size.squeeze(-1)  =>  values * size.squeeze(-1)
inverses of what is not definite  <-  solvers::an_indefinite_factor_fails_the_inverse
    failed = info != 0  =>  failed = info != info

== kronecker/doubly_factored.py
a best rank one of another scale  <-  doubly_factored::18_rank_one_in_float32_far_from_one
    root = (sigma * size).sqrt()  =>  root = sigma.sqrt()

== kronecker/exact.py
a LayerNorm's own eps is ignored
  <-  exact_blocks::an_exact_block_is_the_mean_outer_product_of_gradients
  - return layer_norm(x, module.normalized_shape, eps=module.eps)
  + return layer_norm(x, module.normalized_shape)
parts of one example averaged  <-  exact_blocks::positions_are_expanded_or_reduced
    rows.unflatten(0, (-1, positions)).sum(1)  =>  rows.unflatten(0, (-1, positions)).mean(1)

== kronecker/experts.py
tokens without a loss are examples of their experts
  <-  experts::tokens_without_a_loss_are_not_examples
    x.pairs(module, d, options.row_mask.mask)  =>  x.pairs(module, d)
gradients of experts without the weights of their tokens
  <-  experts::each_experts_factors_equal_those_computed_by_hand
    (d[inputs.tokens] * weights)  =>  (d[inputs.tokens])

== kronecker/verification.py
layers that are verified only at the start
  <-  verification::a_weight_used_outside_of_its_module_is_also_found_later
    bisect_right(VERIFIED_FROM, step)  =>  1
a penalty on the weight's length counted as unexplained
  <-  verification::a_weight_penalty_does_not_hide_missing_pairs
    if weights:  =>  if False:
gradients of torch.autograd.grad counted as the weight's
  <-  verification::gradients_of_other_quantities_do_not_count
    if not is_reached(weight):  =>  if False:

== kronecker/layers.py
padding tokens count
  <-  invariants_factors::7_an_embedding_has_the_factors_of_a_linear_on_one_hot_rows
    added = added * (tokens != padding)  =>  pass
a sum over positions for their mean  <-  invariants_factors::4_reduce_is_exact_with_pooled_positions
    return x.mean(1), d.sum(1)  =>  return x.sum(1), d.sum(1)
padded rows in A  <-  example_counts::rows_without_a_gradient_are_not_examples
  - return LinearRows(row_mask.apply(x), d, row_mask)
  + return LinearRows(x, d, row_mask)

== kronecker/factors.py
A of experts without any G so far
  <-  experts::experts_whose_output_weight_starts_at_zero_have_finite_factors
    (new_shares > 0) & (shares_after > 0)  =>  new_shares > 0
statistics that overflow later
  <-  failures::running_averages_stay_finite_whatever_the_size_of_gradients
    numbers < torch.finfo(numbers.dtype).max / MAX_GROWTH  =>  numbers.isfinite()
sums of narrow factors that travel as they were added up
  <-  invariants_factors::13_bfloat16_factors_are_divided_by_the_exact_number_of_examples
    factor.to(staged.factor_dtype)  =>  factor
the mean eigenvalue of G of modules used twice
  <-  invariants_factors::9_the_mean_eigenvalues_of_a_module_used_twice_are_those_of_its_factors
    (sums.factors[name], mean_eigenvalues)  =>  (sums.factors[name],)
sums divided in bfloat16
  <-  invariants_factors::13_bfloat16_factors_are_divided_by_the_exact_number_of_examples
    mean = total.to(counts.dtype)  =>  mean = total
an average that starts from zero  <-  invariants_factors::13_running_average_is_the_debiased_ema
    weight * decay + 1.0  =>  weight * decay + (1.0 - decay)
a step without examples forgets
  <-  invariants_factors::13_a_step_without_examples_leaves_the_average_bit_for_bit
    torch.where(is_updated, weight * decay + 1.0, weight, out=weight)  =>  weight.mul_(decay).add_(1.0)
a second pass through a forward as a micro-batch
  <-  example_counts::two_losses_of_one_forward_pass_are_not_micro_batches
    or not again  =>  or True
both factors of gradients with the trace of the curvature
  <-  kinds::a_tied_embedding_has_the_partial_traces_of_both_uses
    if shape.gradient_factored:  =>  if False:
a short batch counts alone  <-  defaults::a_short_last_batch_is_weighted_by_its_examples
  - stack_in_place(entries, "examples").lerp_(num_rows.to(weight.dtype), step)
  + stack_in_place(entries, "examples").copy_(num_rows)
an expert's A moves as if it had tokens in all steps
  <-  experts::a_is_the_mean_over_an_experts_own_tokens
    step * new_shares / safe_shares_after, 0.0)  =>  step, 0.0)

== kronecker/fisher.py
micro-batches draw the same noise
  <-  contract_steps::each_micro_batch_samples_its_own_labels
    hash((self._step, call - self._first_call, self._rank))  =>  hash((self._step, 0, self._rank))
ranks draw the same noise  <-  kaisa::each_rank_samples_its_own_labels
  - hash((self._step, call - self._first_call, self._rank))
  + hash((self._step, call - self._first_call, 0))
a coin that falls the other way
  <-  invariants_factors::14_labels_are_sampled_from_the_models_distribution
    (uniform < output.sigmoid())  =>  (uniform > output.sigmoid())

== kronecker/gradient.py
factors of gradients on the scale of their mean
  <-  gradient_factors::factors_are_running_averages_over_gradients
    factor * (scale * examples)  =>  factor * examples

== kronecker/kinds.py
keys counted as queries are  <-  attention::factors_equal_those_of_separate_linears
    (counts[0] / count)  =>  1.0
torch's own layers are registered anew  <-  kinds::rules_of_torchs_layers_cannot_be_replaced
    if has_rule and module_class.__module__.startswith("torch."):  =>  if False:
a forward that another package's class does not have
  <-  kinds::subclasses_of_linear_count_as_linears
    elif not scales_output:  =>  elif False:
sparse embeddings are preconditioned
  <-  layer_search::embeddings_with_sparse_gradients_fall_back_to_the_base
    if getattr(module, "sparse", False):  =>  if False:

== kronecker/model_blocks.py
the largest factor that is allowed is refused
  <-  layer_search::layers_above_max_factor_dim_fall_back_to_the_base
    or largest <= self.max_factor_dim:  =>  or largest < self.max_factor_dim:
experts that reduce takes for examples of their own
  <-  experts::experts_ignore_sequence_boundaries
    if self._rules.approximation == "reduce":  =>  if False:

== kronecker/layer_curvature.py
a curvature object of another covariance
  <-  curvature_functions::samples_have_the_inverse_curvature_as_covariance
    normal * (values + gamma).rsqrt()  =>  normal / (values + gamma)
a diagonal of corrected eigenvalues in their own basis
  <-  curvature_functions::a_layers_functions_equal_those_of_the_dense_matrix
    _multiply(self.corrected, squared)  =>  _multiply(self.corrected, {})
corrected eigenvalues without the vectors that they belong to
  <-  curvature_functions::corrected_eigenvalues_keep_the_order_of_their_eigenvectors
    basis=read_eigen(tensors) or None,  =>  basis=None,
relative damping by the trace
  <-  curvature_functions::a_layers_functions_equal_those_of_the_dense_matrix
    self.trace() / math.prod(self.shape.gradient_shape)  =>  self.trace()

== kronecker/model_curvature.py
an owner that fails alone  <-  curvature_functions::owners_together_equal_one_process
    if failures:  =>  if False:
an index that is there before its layers
  <-  curvature_functions::an_incomplete_folder_is_refused
    remove_index(folder)  =>  pass

== kronecker/statistics.py
layers that failed a comparison and are never compared again
  <-  verification::a_layer_that_failed_is_compared_until_it_passes
    if block.unverified or block.comparisons <  =>  if block.comparisons <
micro-batches that FSDP2 has yet to average dropped
  <-  fsdp::gradient_accumulation_works_with_and_without_gradient_sync
    if lacks_gradient and not self._has_unreduced_gradients(module):  =>  if lacks_gradient:
no scale of the loss  <-  invariants_factors::11_a_grad_scaler_changes_nothing
  - return 1.0 / scale
  + return 1.0 / torch.ones_like(scale)
a pair that is kept over zero_grad
  <-  queued_statistics::a_queued_pair_belongs_to_the_step_that_captured_it
    if pair.is_valid]  =>  ]
a slice that counts by its own size
  <-  queued_statistics::pairs_are_queued_until_the_pass_ends_or_a_size_is_reached
    max(4 * self.size, storage_bytes)  =>  4 * self.size
rows without an example in the A of equal Linears
  <-  queued_statistics::queued_pairs_give_the_sums_of_single_pairs
    x = x * row_mask.mask.to(x.device).unsqueeze(-1)  =>  pass
statistics that are not finite are not counted as dropped
  <-  queued_statistics::queued_pairs_give_the_sums_of_single_pairs
    count_dropped([member.pair.staged for member in in_order], dropped)  =>  pass
a gradient's scale once instead of squared
  <-  queued_statistics::queued_pairs_give_the_sums_of_single_pairs
    factors["G"].mul_(scale**2)  =>  factors["G"].mul_(scale)

== kronecker/rows.py
padded rows in N  <-  example_counts::padding_does_not_change_the_factors
    if all_terms or self._type_of(group) == "examples":  =>  if True:
examples beyond a hinge leave A
  <-  loss_terms::examples_with_zero_gradients_are_loss_terms
    if not self._position_counts:  =>  if False:
a row without a gradient at one layer leaves its A
  <-  loss_terms::padding_is_not_in_a_but_prompts_are
  - self.has_gradient = _union(self.has_gradient, row_mask.mask)
  + self.has_gradient = row_mask.mask
passes that have nothing in common count together
  <-  loss_terms::losses_of_separate_layers_count_their_own_terms
    p for p in candidates if not layers.isdisjoint(p.layers)  =>  p for p in candidates

== kronecker/solvers.py
an inverse by Cholesky without its scale
  <-  defaults::grafting_multiplies_newton_steps_by_the_mean_damped_curvature
    (g * multiplier.view(-1, 1, 1))  =>  g
γ of three factors split as of two  <-  doubly_factored::15_three_factor_solves_equal_dense_solves
    damping ** (1 / len(means))  =>  damping ** (1 / 2)
π is 1  <-  solvers::solves_equal_the_dense_solve
    pi = (logarithms - logarithms.mean(0)).exp()  =>  pi = (logarithms - logarithms).exp()
what has no curvature moves without end
  <-  solvers::without_damping_directions_of_zero_curvature_do_not_move
    posinf=0.0  =>  posinf=1e30
exact blocks damped by half  <-  exact_blocks::a_step_equals_the_dense_solve
  - return None, torch.zeros_like(means[1]) + damping
  + return None, torch.zeros_like(means[1]) + 0.5 * damping
rounded inverses that may be indefinite  <-  rounding::a_rounded_matrix_is_at_least_the_matrix
    diagonal(matrix) + error.sum(-1)  =>  diagonal(matrix).clone()

== kronecker/storage.py
tensors out of order taken for a stack
  <-  queued_statistics::a_stack_of_contiguous_tensors_is_a_view
    and part.storage_offset() == offset  =>  and True
a transposed slice taken for the next
  <-  queued_statistics::a_stack_of_contiguous_tensors_is_a_view
    or not part.is_contiguous()  =>  or False

== kronecker/storage.py
a triangle mirrored from the wrong side  <-  triangles::packing_and_back_is_the_identity
    x11.triu() + x11.triu(1).mT  =>  x11.tril() + x11.tril(-1).mT

== lanczos/closure.py
a vector of losses counts as one example  <-  hvp::micro_batches_of_outputs_equal_one_batch
    examples = len(loss) if examples is None else examples  =>  examples = examples or 1.0
a loader's batches weigh the same  <-  estimates::a_loader_gives_the_mean_over_its_examples
    lambda z: criterion(z, targets)), len(targets)  =>  lambda z: criterion(z, targets)), 1
an empirical Fisher is a sum  <-  hvp::empirical_fisher_is_the_mean_of_outer_products
    pushed = [u / len(u) for u in pushed]  =>  pass

== lanczos/estimates.py
a variance of samples divided by their number  <-  estimates::the_error_of_a_diagonal_follows_from_two_samples
    (squares / max(count - 1, 1) / max(count, 1))  =>  (squares / max(count, 1) / max(count, 1))
the steep directions' diagonal counts them twice
  <-  estimates::a_matrix_of_low_rank_is_found_exactly
    (2 * HQ - inner @ Q)  =>  (2 * HQ)

== lanczos/hvp.py
differences as wide as the parameters' dtype
  <-  mrdho2_fsdp::finite_differences_work_with_low_precision_passes
    dtypes |= compute_dtypes(self._model)  =>  pass
micro-batches' losses weigh the same
  <-  lanczos::the_loss_of_micro_batches_is_weighted_by_their_examples
    examples * evaluation.loss.detach()  =>  evaluation.loss.detach()
micro-batches weigh the same  <-  hvp::micro_batches_equal_one_batch
    if factor != 1.0:  =>  if False:
buffers go on from one product to the next  <-  hvp::buffers_are_restored_at_each_evaluation
    self.buffer.data.copy_(self.value)  =>  pass
a loss of the positive Hessian under maximize  <-  dho2::a_worse_final_update_is_rejected
    return self._sign * float(loss) / float(examples)  =>  return float(loss) / float(examples)
the Hessian of the negative loss has its sign
  <-  dho2_state::maximizing_the_negative_loss_equals_minimizing_the_loss
  - weight = self._sign * self._hessian.examples
  + weight = self._hessian.examples

== lanczos/lanczos.py
orthogonalised once  <-  lanczos::the_basis_is_orthonormal_and_tridiagonalizes_the_matrix
    h.addmv_(basis.t(), second.to(h.dtype), alpha=-1)  =>  pass
each process decides by itself  <-  lanczos_ranks::one_process_decides
  - stop = int(space.broadcast_from_first(decision))
  + stop = int(stop)
eigenvectors of B need not be orthonormal  <-  lanczos::a_wrong_decomposition_is_rejected
    & (overlap <= DECOMPOSITION_TOL)  =>  & True
each process has signs of its own  <-  lanczos_ranks::one_process_decides
    packed = space.broadcast_from_first(packed)  =>  pass
it stops before all pairs have converged  <-  lanczos::iterations_stop_when_all_pairs_are_within_tol
    tol * ritz.values[indices].abs()).all())  =>  tol * ritz.values[indices].abs()).any())
vectors are rounded under autocast
  <-  mrdho2_accelerator::autocast_around_serve_does_not_round_the_vectors
  - torch.mv(self.basis.t(), column, out=vector)
  + vector.copy_((self.basis.t() @ column[:, None])[:, 0])
a smallest eigenvalue for a largest  <-  lanczos::a_full_run_finds_both_ends
    *range(smallest)]  =>  *range(1, smallest + 1)]

== lanczos/spectrum.py
processes' losses weigh the same  <-  lanczos_ranks::a_mean_loss_is_weighted_by_examples
  - sums[0] = hessian.loss
  -     sums[1] = hessian.examples
  + sums[0] = hessian.loss / hessian.examples
  +     sums[1] = 1.0

== measuring/accumulators.py
each call of a layer has a square of its own
  <-  measure_terms::eigenvalues_cover_all_calls_of_a_layer
    if len(pairs) >= self._num_calls[layer]:  =>  if True:
positions that examples share pass for each one's
  <-  measure_terms::shared_positions_have_no_per_example_gradients
    if self._shares_indices(layer, x):  =>  if False:

== measuring/batches.py
padding that measure counts  <-  measure::factors_exclude_padding
    rows = rows.index_select(0, index)  =>  pass
terms of ignored labels count  <-  measure_terms::ignored_labels_are_not_terms
    if batch.term_counts and value  =>  if False and value
labels sampled for padding  <-  measure::no_label_is_sampled_for_padding
  -     if rows.index is not None:
  -         logits
  +     if False:
  +         logits

== measuring/hooks.py
buffers stay as measure leaves them  <-  measure::the_model_is_left_as_it_was
    buffer.data.copy_(value)  =>  pass

== measuring/measure.py
an A that is a mean over terms  <-  measure::corrected_eigenvalues_equal_a_dense_reference
    if factor == "A":  =>  if False:
terms of a batch that is repeated for FSDP2
  <-  measure_ranks::many_processes_equal_one
  -                     if has_batch:
  +                     if True:

== measuring/sums.py
sums in the host's memory are of the last batch
  <-  measure::keep_cpu_changes_nothing
    if key in sums:  =>  if False:
sums that come after their turn in the last batch are lost
  <-  measure_ranks::a_layer_that_a_process_skips_does_not_block_the_others
  -         self._send_until(len(self._order))
  -         return
  +         return

== optimizers/base.py
steps within backward
  <-  contract_state_groups::a_step_inside_backward_raises
    if torch._C._current_graph_task_id() != NO_BACKWARD:  =>  if False:
collected factors stay  <-  factor_exchange::gathered_factors_are_dropped_at_the_next_step
    self._collected = None  # outdated after this step  =>  pass
a first zero step taken for a checkpoint's
  <-  contract_state::a_first_step_with_zero_gradients_counts
    not self.state and is_checkpointing()  =>  not self.state
the step count is not loaded  <-  contract_state::a_checkpoint_contains_the_number_of_steps
    self._training.resume_at(checkpoint.steps)  =>  pass
an optimizer that holds itself  <-  contract_state::an_unreferenced_optimizer_is_deleted
    partial(_publish_state_of, weakref.ref(self))  =>  partial(_publish_state_of, lambda: self)
one kind of processes alone hears of wrong shards
  <-  mrdho2_fsdp::unsupported_shards_raise_on_every_rank
    if any(world.all_gather_object(is_sharded)):  =>  if is_sharded:
two bases: half a group stays  <-  aux_base::an_invalid_group_changes_nothing
    self.param_groups[:] = prev_groups  =>  pass
two bases: one's defaults for both
  <-  aux_base::an_added_group_is_split_unless_it_names_its_base
    {**self.defaults, **base_of(self._base, group).defaults}  =>  self.defaults
a state that loses its curvature by close()
  <-  found::closing_does_not_change_an_earlier_state_dict
    {part: entry[part] for part in parts}  =>  entry

== optimizers/find_model.py
lists of parameters taken for the model  <-  from_parameters::copies_are_not_mistaken_for_the_model
    type(module) is nn.Module or _is_instance(module, WEAK_OWNERS)  =>  False
aliases taken for the model  <-  from_parameters::copies_are_not_mistaken_for_the_model
    most_owners = max(len(  =>  most_owners = min(len(
one of two models that share their parameters
  <-  from_parameters::either_of_two_models_with_the_same_parameters_can_run
    roots += best  =>  roots += best[:1]
a DDP that nobody has  <-  from_parameters::parameters_of_a_ddp_model_find_the_wrapped_model
    gc.collect()  =>  pass
whole parameters of FSDP2's root  <-  from_parameters::parameters_of_a_sharded_model_find_the_model
    cast(Any, module).reshard()  =>  pass
frozen parts that are not the model's
  <-  from_parameters::frozen_parts_of_the_network_are_part_of_the_model
    if len(added) > most_added and not trains  =>  if False

== optimizers/config.py
Newton's scale by default  <-  defaults::grafting_is_the_default_and_others_follow_from_it
    grafted = self.grafting == "gradient"  =>  grafted = False
every base taken for SGD
  <-  defaults::default_settings_depend_on_the_base defaults::with_two_bases_the_first_decides_the_defaults
    adaptive = is_adaptive(base)  =>  adaptive = False
a step scale that follows with Newton's scale
  <-  defaults::grafting_is_the_default_and_others_follow_from_it
    values["step_scale"] = grafted and  =>  values["step_scale"] =
a usual change beside Newton steps
  <-  defaults::grafting_is_the_default_and_others_follow_from_it
    if is_auto(self.kl_clip) and not grafted  =>  if False
a step scale over a schedule-free base
  <-  defaults::grafting_is_the_default_and_others_follow_from_it
    = grafted and not schedule_free  =>  = grafted
a floor of the damping beside absolute damping  <-  defaults::grafting_is_the_default_and_others_follow_from_it
    DAMPING_FLOOR if self.relative_damping else 0.0  =>  DAMPING_FLOOR

== optimizers/kaisa.py
colocate_factors without effect  <-  kaisa::the_placement_options_place_layers
    colocate=colocate_factors,  =>  colocate=True,

== utils/checks.py
a tensor on the device is waited for
  <-  device_hyperparameters::hyperparameters_on_the_device_are_not_synchronized
    if value.device.type != "cpu":  =>  if value.device.type == "meta":

== optimizers/keywords.py
two bases: special keywords without effect
  <-  aux_base::without_curvature_two_bases_equal_two_separate_optimizers
    aux_result.update(aux_kwargs)  =>  pass

== planning/cost.py
inverses on threads that are free although training uses the cores
  <-  planning_cost::inverses_on_threads_cost_nothing_if_training_runs_on_a_device
    if is_distkfac and machine.device != "cpu":  =>  if is_distkfac:
factors that every rank keeps although their owners do
  <-  planning_cost::memory_of_factors_and_inverses
    if is_dpkfac or setting.owned_factors:  =>  if False:

== planning/plan.py
plans of settings that do not fit  <-  planning_plan::memory_is_honored
    fitting = [choice for choice in choices if choice.fits]  =>  fitting = list(choices)

== reporting/summary.py
frozen parameters in the summary's share  <-  summary::only_trainable_parameters_are_counted
  - [row for row in self.rows if row.status != "frozen"]
  + list(self.rows)
""")
