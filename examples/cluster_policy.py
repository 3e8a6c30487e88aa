"""Reinforcement learning on a cluster: two workers here; others join with 'germline worker HOST:PORT'."""

import germline as gl
from germline.recipes import make_recipe

if __name__ == "__main__":
    recipe = make_recipe("cartpole", {}, seed=0)
    fleet = gl.Elastic(workers=2, recipe="cartpole")
    try:
        result = gl.train(
            recipe.model,
            objective=recipe.objective,
            strategy=recipe.strategy,
            target="dev_return=475",
            generations=30,
            fleet=fleet,
        )
    finally:
        fleet.close(ended=True)
    print(f"return {result.summary['metrics']['test_return']:.1f} after {result.summary['samples']:,} steps")
